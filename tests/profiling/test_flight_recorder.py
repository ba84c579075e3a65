from __future__ import annotations

import datetime
import os
import pickle
import pickletools
import threading
from pathlib import Path

import pytest
import torch.distributed

from nearpeak.cli.main import main
from nearpeak.errors import FileProblem
from nearpeak.profiling.flight_recorder import hang_in_dumps, plain_pickle

CODE = str(Path(__file__).parent / "train.py")


def collective(number, *, name="nccl:all_reduce", line=9, retired=False, group=("0", "default_pg")):
    return {
        "collective_seq_id": number,
        "process_group": group,
        "profiling_name": name,
        "time_created_ns": number,
        "retired": retired,
        "state": "completed" if retired else "scheduled",
        "frames": [
            {"name": "all_reduce", "filename": torch.distributed.__file__, "line": 3},
            {"name": "step", "filename": CODE, "line": line},
        ],
    }


def write(folder, rank, *entries, ranks="[0, 1, 2]"):
    dump = {"version": "2.9", "entries": list(entries), "pg_config": {"0": {"ranks": ranks}}}
    (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def test_the_rank_that_did_not_come_is_named(tmp_path, capsys):
    write(tmp_path, 0, collective(6, retired=True), collective(7))
    write(tmp_path, 1, collective(6, retired=True, line=4))
    (tmp_path / "notes.txt").write_text("not a dump")
    assert main(["profile", "--trace", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Dumps of torch's flight recorder: 2 of 3 ranks.",
        "all_reduce 7 of group 0 has not ended: rank 0 has called it, at train.py:9.",
        "Rank 1 has not called it: its last one was called at train.py:4, after number 6.",
        "Rank 2 has no dump.",
    ]


def test_nothing_was_under_way(tmp_path):
    write(tmp_path, 0, collective(6, retired=True), ranks="[0]")
    assert hang_in_dumps(tmp_path) == [
        "Dumps of torch's flight recorder: 1 of 1 ranks.",
        "No collective was under way in any of them.",
        "Rank 0 was last at train.py:9, after collective number 6 of group 0.",
    ]


def test_a_folder_without_dumps(tmp_path):
    (tmp_path / "rank0.json").write_text("{}")
    assert hang_in_dumps(tmp_path) is None


def test_there_is_no_profile_to_save(tmp_path, capsys):
    write(tmp_path, 0, collective(7))
    assert main(["profile", "--trace", str(tmp_path), "--json", "-"]) == 2
    assert "no profile to save" in capsys.readouterr().err


class Attack:
    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_of_code_is_refused_and_not_run(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileProblem, match="not plain data"):
        plain_pickle(pickle.dumps([1, Attack()], protocol=protocol))
    assert not (tmp_path / "made").exists()


def test_damaged_pickles_are_errors():
    whole = pickle.dumps({"entries": [collective(1), collective(2)]}, protocol=2)
    for cut in range(1, len(whole)):
        with pytest.raises(FileProblem):
            plain_pickle(whole[:cut])
    for opcode in pickletools.opcodes:  # an operand, a mark or an object that is not there
        try:
            plain_pickle(b"\x80\x02" + opcode.code.encode("latin-1") + b"1\n1\n.")
        except FileProblem:
            continue


def test_what_torch_writes_is_read_as_it_is(tmp_path):
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump is None:
        pytest.skip("this torch has a flight recorder for NCCL alone")
    store = torch.distributed.HashStore()
    group = torch.distributed.ProcessGroupGloo(store, 0, 1, datetime.timedelta(seconds=10))
    thread = threading.Thread(target=lambda: group.allreduce([torch.ones(3)]).wait())
    thread.start()
    thread.join()
    written = dump()
    assert plain_pickle(written) == pickle.loads(written)
