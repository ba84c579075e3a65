"""The catalogues of models and systems, and one entry of either, as documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nearpeak.machines import catalogue
from nearpeak.plan.cluster.cluster import Cluster, System
from nearpeak.plan.models.model import FEEDS, MIXERS, Model, count_parameters, forward_flops, kv_bytes_per_token
from nearpeak.render.document import Document, Paragraph, Table
from nearpeak.units import quantity

SEQUENCE = 4096


def models_document(models: Sequence[Model]) -> Document:
    """One line per model."""
    rows = [
        (
            model.name,
            weights(model.parameters),
            weights(model.active_parameters) if model.is_moe else "-",
            str(model.layers),
            str(model.hidden),
            _short_attention(model),
            experts(model).replace(" + shared", " + s"),
        )
        for model in models
    ]
    return Document(
        title=f"{len(models)} models",
        parts=(
            Table(
                headers=("name", "weights", "active", "layers", "hidden", "attention", "experts"),
                rows=tuple(rows),
                align="lrrrrll",
            ),
            Paragraph(
                text="attention: heads, and those of keys. + s: shared experts. "
                "`nearpeak plan models NAME` shows one with its source. A config.json does as well.",
                kind="small",
            ),
        ),
    )


def model_document(model: Model) -> Document:
    """One model."""
    numbers, flops = count_parameters(model), forward_flops(model, SEQUENCE)
    facts = [
        f"{weights(model.parameters)} weights"
        + (f", {weights(model.active_parameters)} active" if model.is_moe else "")
    ]
    rows = [
        ("layers", str(model.layers)),
        ("hidden", str(model.hidden)),
        ("vocabulary", f"{model.vocabulary}{', tied' if model.tied else ''}"),
        ("mixers", _letters(model.mixers, MIXERS)),
        ("feeds", _letters(model.feeds, FEEDS)),
        ("attention", attention(model)),
        *((("window", str(model.window)),) if model.window else ()),
        *((("intermediate", str(model.intermediate)),) if model.intermediate else ()),
        *((("experts", f"{experts(model)}, each {model.expert_intermediate} wide"),) if model.is_moe else ()),
    ]
    sizes = [
        ("attention, per layer", numbers.attention),
        ("dense feed, per layer", numbers.dense if "D" in model.feeds else 0),
        ("one expert", numbers.expert if model.is_moe else 0),
        ("shared experts and router, per layer", numbers.expert_shared if model.is_moe else 0),
        ("state space, per layer", numbers.state_space if "M" in model.mixers else 0),
        ("embedding", numbers.embedding),
        ("output layer", numbers.output),
        ("all", numbers.total),
    ]
    work = [
        (f"FLOPs of a token, forward, {SEQUENCE} tokens", quantity(flops.total, "FLOP")),
        ("FLOPs of a token, training", quantity(flops.training, "FLOP")),
    ]
    if model.causal and model.attention_layers:
        work.append(("KV cache of a token, 16 bits", quantity(kv_bytes_per_token(model, 2.0), "B")))
    return Document(
        title=model.name,
        facts=tuple(facts),
        parts=(
            Table(title="Shape", headers=("what", "value"), rows=tuple(rows), align="ll"),
            Table(
                title="Weights",
                headers=("part", "weights"),
                rows=tuple((name, f"{value:,}") for name, value in sizes if value),
                totals=1,
            ),
            Table(title="Work", headers=("what", "value"), rows=tuple(work)),
            Paragraph(text=f"Source: {model.source}", kind="small"),
        ),
    )


def clusters_document(systems: Sequence[System]) -> Document:
    """One line per system."""
    machines = catalogue.load().machines
    rows = [
        (
            system.id,
            system.machine,
            f"{system.gpus_per_node}/{system.domain_size}",
            system.fabric,
            quantity(system.link_bandwidth(machines[system.machine]), "B/s"),
            quantity(_network(system), "B/s"),
        )
        for system in systems
    ]
    return Document(
        title=f"{len(systems)} systems",
        parts=(
            Table(headers=("system", "GPU", "GPUs", "fabric", "link", "network"), rows=tuple(rows), align="llrlrr"),
            Paragraph(
                text="GPUs: under one host / joined by one NVLink switch. Bandwidths are per GPU, one direction. "
                '`nearpeak plan clusters "NAME x GPUS"` shows one with its sources.',
                kind="small",
            ),
        ),
    )


def _network(system: System) -> float:
    """Bytes/s of one GPU into the network when all of a node send."""
    network = system.network
    if network.per == "gpu":
        return network.bandwidth
    ports = 1 if network.per == "node" else system.adapters_per_node
    return network.bandwidth * ports / system.gpus_per_node


def cluster_document(cluster: Cluster) -> Document:
    """One cluster."""
    rows = [
        ("GPUs", f"{cluster.gpus} x {cluster.machine.name}"),
        ("nodes", f"{cluster.nodes} of {min(cluster.gpus, cluster.gpus_per_node)}"),
        ("NVLink domain", f"{cluster.domain} of {cluster.domain_size} GPUs, {cluster.fabric}"),
        ("link", f"{cluster.link_name}, {quantity(cluster.link_bandwidth, 'B/s')} per GPU"),
        ("network", f"{cluster.network_name}, {quantity(cluster.network_bandwidth, 'B/s')} per GPU"),
        (
            "adapters",
            f"{cluster.adapters_per_node} per node, {'shared' if cluster.adapters_shared else 'one GPU each'}",
        ),
        ("in-switch reduction", "yes" if cluster.in_switch_reduction else "no"),
        ("memory", f"{quantity(cluster.machine.memory_bytes, 'B')} per GPU"),
    ]
    sources = [f"{name}: {source}" for name, source in cluster.sources.items() if name in ("system", "network")]
    return Document(
        title=f"{cluster.machine.id} x {cluster.gpus}",
        parts=(
            Table(headers=("what", "value"), rows=tuple(rows), align="ll"),
            *(Paragraph(text=source, kind="small") for source in sources),
        ),
    )


def weights(number: float) -> str:
    """As "6.74 B"."""
    return quantity(number, "").strip().replace(" G", " B")


def attention(model: Model) -> str:
    """Heads, and how keys and values are shared."""
    if not model.attention_layers:
        return "none"
    if model.kv_rank:
        return f"MLA {model.heads} heads, rank {model.kv_rank}"
    kind = "MHA" if model.kv_heads == model.heads else "MQA" if model.kv_heads == 1 else "GQA"
    return f"{kind} {model.heads}" + ("" if kind == "MHA" else f"/{model.kv_heads}") + f" x {model.head_dim}"


def _short_attention(model: Model) -> str:
    if model.kv_rank or not model.attention_layers:
        return attention(model).partition(",")[0].replace(" heads", "")
    return attention(model).partition(" x ")[0]


def experts(model: Model) -> str:
    """As "8 of 256 + shared"."""
    if not model.is_moe:
        return "-"
    return f"{model.active_experts} of {model.experts}" + (" + shared" if model.shared_intermediate else "")


def _letters(letters: str, meanings: dict[str, str]) -> str:
    return ", ".join(f"{number} x {meanings[letter]}" for letter, number in Counter(letters).most_common())
