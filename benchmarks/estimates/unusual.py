"""Fifty unusual architectures of transformers, drawn at random, estimated on fake tensors as they are.

    python -m benchmarks.estimates.unusual --json benchmarks/results/unusual_architectures.json

Drawn are types of models that are not plain decoders of text: audio, vision, video, detection, speech, time series,
mixtures of experts, state spaces, encoder-decoders, several modalities. Each is built from its default configuration,
with at most four layers where the configuration has a number of them, and runs forward and backward in training mode:
layers that are skipped at random are drawn. What is asked: does the estimate succeed without a change of the model, is
the second one the same, and which values were assumed. A type that needs a further package is replaced by the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import inspect
import json
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import nearpeak

SEED = 2027
COUNT = 50
BATCH, TOKENS = 2, 64
HEADS = (
    *("CTC", "SPEECH_SEQ_2_SEQ", "OBJECT_DETECTION", "SEQ_TO_SEQ_CAUSAL_LM", "UNIVERSAL_SEGMENTATION"),
    *("SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION", "IMAGE_CLASSIFICATION"),
    *("TIME_SERIES_PREDICTION", "MULTIMODAL_LM", "CAUSAL_LM", "PRETRAINING"),
)
"""The first of these heads that a type has is on its model; without one, it is the bare model."""
UNUSUAL_DECODERS = (
    *("mamba", "rwkv", "xlstm", "zamba", "jamba", "bamba", "moe", "falcon_h1", "recurrent", "next", "lfm", "hymba"),
    *("nemotron_h", "gpt_oss", "mixtral", "dbrx", "jet", "granitemoe", "deepseek", "kimi", "minimax", "olmoe"),
    *("reformer", "xlnet", "bigbird", "prophetnet", "cpm", "ctrl", "xlm", "trocr", "musicgen", "whisper", "fuyu"),
    *("git", "opt", "bloom"),
)
"""Parts of the names of decoders that are drawn too."""
LAYERS = (
    *("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "depth", "n_layers"),
    *("num_encoder_layers", "num_decoder_layers", "vision_layers", "text_layers"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "informer": {"prediction_length": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4},
}
"""What the default configuration of a type lacks."""
WHOLE = ("data2vec-vision",)
"""Types whose heads take results of certain layers."""
MEL_BINS = ("input_size", "num_mel_bins", "feature_size", "input_feat_per_channel", "mel_bins", "input_dim")
SHORT_TEXT = {"vilt": 40}


def names() -> list[str]:
    """All types to draw from."""
    decoders = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return sorted(
        name
        for name in modeling_auto.MODEL_MAPPING_NAMES
        if name not in decoders or any(part in name for part in UNUSUAL_DECODERS)
    )


def configurations(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            yield from configurations(value)


def setting(config: Any, *keys: str, default: Any = None) -> Any:
    values = (getattr(part, key, None) for part in configurations(config) for key in keys)
    return next((value for value in values if value is not None), default)


def shorten(config: Any) -> None:
    """At most four layers where a configuration has their number alone, and no list with an entry for each."""
    for part in configurations(config):
        lengths = {len(value) for value in vars(part).values() if isinstance(value, list)}
        for key in LAYERS:
            value = getattr(part, key, None)
            if type(value) is int and value > 4 and value not in lengths:
                with contextlib.suppress(NotImplementedError):  # it follows from others
                    setattr(part, key, 4)


def class_of(name: str) -> type:
    tables = (getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS)
    found = next((table[name] for table in tables if name in table), modeling_auto.MODEL_MAPPING_NAMES[name])
    return getattr(transformers, found[0] if isinstance(found, (list, tuple)) else found)


def inputs(model: Any, config: Any) -> Iterator[dict[str, Any]]:
    """Arguments that the model may take, by the names of its parameters; the first that it accepts counts."""
    takes = inspect.signature(model.forward).parameters
    size = setting(config, "image_size", default=224)
    size = (size["height"], size["width"]) if isinstance(size, dict) else size
    height, width = (size[0], size[-1]) if isinstance(size, (list, tuple)) else (size, size)
    channels = setting(config, "num_channels", "in_channels", "in_chans", default=3)
    mels = setting(config, *MEL_BINS, default=80)
    frames = setting(config, "num_frames", "frames_per_clip", default=8)
    tokens = SHORT_TEXT.get(config.model_type, TOKENS)
    ids = torch.ones(BATCH, tokens, dtype=torch.long)
    decoder = {"decoder_input_ids": ids[:, :16].clone()} if "decoder_input_ids" in takes else {}
    text: dict[str, Any] = {"input_ids": ids} if "input_ids" in takes else {}
    if "bbox" in takes:
        text["bbox"] = torch.zeros(BATCH, tokens, 4, dtype=torch.long)
    main = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in takes and (main == "input_ids" or main not in takes):
        yield text
        yield {**text, **decoder}
        codebooks = setting(config, "num_codebooks")
        if codebooks:
            yield {"input_ids": torch.ones(BATCH, tokens, codebooks + 1, dtype=torch.long)}
    if "pixel_values" in takes:
        image = torch.zeros(BATCH, channels, height, width)
        video = torch.zeros(BATCH, frames, channels, height, width)
        yield {"pixel_values": image}
        yield {**text, "pixel_values": image}
        yield {"pixel_values": image, **decoder}
        yield {"pixel_values": video}
        yield {**text, "pixel_values": video}
        if "image_attention_mask" in takes:
            seen = torch.ones(BATCH, tokens, frames, dtype=torch.long)
            yield {**text, "pixel_values": video, "image_attention_mask": seen}
        yield {"pixel_values": torch.zeros(BATCH, channels, 640, 640)}
    if "pixel_values_videos" in takes:
        yield {"pixel_values_videos": torch.zeros(BATCH, frames, channels, height, width)}
    if "grid_thw" in takes:
        side, grid = setting(config, "patch_size", default=14), torch.tensor([[1, 16, 16]])
        if "hidden_states" in takes:
            pixels = 3 * side**2 * setting(config, "temporal_patch_size", default=2)
            yield {"hidden_states": torch.zeros(256, pixels), "grid_thw": grid}
        else:
            yield {"pixel_values": torch.zeros(256, 3, side, side), "grid_thw": grid}
    if "input_values" in takes:
        sound = torch.zeros(BATCH, 16000)
        spectrum = torch.zeros(BATCH, setting(config, "max_length", default=1024), mels)
        for values in (sound, sound[:, None].clone(), spectrum):
            yield {"input_values": values}
            yield {"input_values": values, **decoder}
    if "input_features" in takes:
        for features in (torch.zeros(BATCH, mels, 3000), torch.zeros(BATCH, 256, mels), torch.zeros(BATCH, 160, 256)):
            yield {"input_features": features, **decoder}
            for mask in {"attention_mask", "input_features_mask"}.intersection(takes):
                yield {"input_features": features, mask: torch.ones(BATCH, features.shape[1], dtype=torch.long)}
        yield {**text, "input_features": torch.zeros(BATCH, 1, 1001, 64)}
    if "past_values" in takes:
        past = setting(config, "context_length", default=32)
        ahead = setting(config, "prediction_length", default=8)
        lagged = past + max(setting(config, "lags_sequence", default=[0]))
        features = setting(config, "num_time_features", default=0)
        yield {
            "past_values": torch.zeros(BATCH, lagged),
            "past_time_features": torch.zeros(BATCH, lagged, features),
            "past_observed_mask": torch.ones(BATCH, lagged),
            "future_values": torch.zeros(BATCH, ahead),
            "future_time_features": torch.zeros(BATCH, ahead, features),
        }
        yield {"past_values": torch.zeros(BATCH, past, setting(config, "num_input_channels", default=1))}
    if "inputs" in takes:
        yield {"inputs": torch.ones(BATCH, 2048, dtype=torch.long)}
    yield text


def build(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """A model, and arguments for it."""
    config = CONFIG_MAPPING[name](**SETTINGS.get(name, {}))
    if name not in WHOLE:
        shorten(config)
    with nearpeak.fake():
        model = class_of(name)(config).train()
        arguments = list(inputs(model, config))
    for item in arguments:
        if "grid_thw" in item:
            item["grid_thw"] = torch.tensor([[1, 16, 16]])
    return model, arguments


def total(value: Any) -> Any:
    """The sum of the means of all results that have gradients."""
    if isinstance(value, torch.Tensor):
        return value.float().mean() if value.is_floating_point() and value.requires_grad else 0.0
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum((total(item) for item in items), 0.0)


def estimate(name: str, on: str) -> dict[str, Any]:
    """The row of a type."""
    model, candidates = build(name)
    row: dict[str, Any] = {"name": name, "class": type(model).__name__}
    errors = []
    for arguments in candidates:

        def step(arguments: dict[str, Any] = arguments) -> None:
            loss = total(model(**arguments))
            if isinstance(loss, torch.Tensor):
                loss.backward()

        start = time.perf_counter()
        try:
            first, second = (nearpeak.estimate(step, on=on) for _ in range(2))
        except Exception as error:
            errors.append(f"{sorted(arguments)}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        facts = [(len(e.ops), e.flops, e.bytes, e.as_written_s, e.fused_s, e.ideal_s) for e in (first, second)]
        return row | {
            "inputs": {key: list(value.shape) for key, value in arguments.items()},
            "ops": len(first.ops),
            "as_written_s": first.as_written_s,
            "ideal_s": first.ideal_s,
            "modeled": first.coverage.seconds_share,
            "unmodeled": dict(first.coverage.unmodeled),
            "same_twice": facts[0] == facts[1],
            "assumed": [note for note in first.notes if "assumed" in note],
            "took_s": time.perf_counter() - start,
        }
    return row | {"errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="h200-sxm", help="a machine of the catalogue")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", nargs="*", help="these types")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    drawn = options.only or random.Random(options.seed).sample(names(), COUNT + 10)
    rows: list[dict[str, Any]] = []
    needs_packages = []
    for name in drawn:
        if len(rows) == COUNT:
            break
        try:
            row = estimate(name, options.on)
        except ImportError:
            needs_packages.append(name)
            continue
        except Exception as error:
            row = {"name": name, "errors": [f"{type(error).__name__}: {error}"]}
        rows.append(row)
        if "errors" in row:
            print(f"{name:32}{row['errors']}", flush=True)
        else:
            same = "" if row["same_twice"] else "  DIFFERS THE SECOND TIME"
            print(f"{name:32}{row['ops']:8} ops{100 * row['modeled']:8.2f} %{row['took_s']:8.1f} s{same}", flush=True)
        result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "on": options.on,
            "seed": options.seed,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "need_further_packages": needs_packages,
            "estimated": sum("errors" not in row for row in rows),
            "of": len(rows),
            "same_twice": sum(row.get("same_twice", False) for row in rows),
            "rows": rows,
        }
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['estimated']} of {result['of']} estimated, {result['same_twice']} twice the same")


if __name__ == "__main__":
    main()
