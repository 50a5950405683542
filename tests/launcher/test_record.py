"""The record of a rank: what a kill, a torn write, a foreign file leave of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtlaunch.launcher.runner import record
from mtlaunch.launcher.runner.record import Slot, read_file

WRITER = """\
import sys
from pathlib import Path
from mtlaunch.launcher.runner.record import Slot
local_rank, writes = int(sys.argv[2]), int(sys.argv[3])
slot = Slot(Path(sys.argv[1]), "n1", local_rank, 4)
number = 0
while number != writes:
    number += 1
    slot.process.write({"rank": local_rank, "number": number, "twice": 2 * number,
                        "filler": "x" * (number % 5000)})
    if number == 1:
        print("writing", flush=True)
slot.exit.write({"rank": local_rank, "exit_code": 0})
"""


def writer(path: Path, local_rank: int, writes: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WRITER, str(path), str(local_rank), str(writes)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def one(path: Path) -> record.RankRecord:
    [found] = read_file(path)
    return found


def test_a_record_comes_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "0" / "n1.rec"
    slot = Slot(path, "n1", 1, 2)
    slot.process.write({"rank": 5, "phase": "running", "name": "Grüße", "peak": 2**40})
    slot.exit.write({"exit_code": 3, "signal": None})
    slot.flush()
    found = one(path)
    assert (found.node, found.local_rank, found.rank) == ("n1", 1, 5)
    assert found.file == "n1.rec"
    assert found.process == {"rank": 5, "phase": "running", "name": "Grüße", "peak": 2**40}
    assert found.exit == {"exit_code": 3, "signal": None}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=8), json_values, max_size=3), min_size=1, max_size=4)
)
def test_the_newest_of_any_writes_is_read(contents: list[dict[str, object]]) -> None:
    memory = bytearray(2 * record.PROCESS_CELL_BYTES)
    cell = record.Cell(memory, 0, record.PROCESS_CELL_BYTES)  # type: ignore[arg-type]
    for content in contents:
        cell.write(content)
    newest = record._newest(bytes(memory), 0, record.PROCESS_CELL_BYTES)
    assert newest == (len(contents), contents[-1])


def test_the_slot_of_a_rank_starts_where_the_format_says(tmp_path: Path) -> None:
    path = tmp_path / "n1.rec"
    Slot(path, "n1", 2, 3).process.write({"rank": 2})
    data = path.read_bytes()
    assert data.startswith(b"MTLREC01")
    assert len(data) == 4096 + 3 * 16384
    assert data[4096 + 2 * 16384 :].count(b"CELL") == 1
    assert data[4096 : 4096 + 2 * 16384].count(b"CELL") == 0


@pytest.mark.parametrize("sequence", [2, 3, 254, 255, 65535])
def test_a_write_torn_anywhere_leaves_the_one_before_or_itself(sequence: int) -> None:
    """Memory is written in no promised order: both a head first and a tail first are tried."""
    size = record.EXIT_CELL_BYTES
    same_length = [{"number": f"{number:8}"} for number in (sequence - 2, sequence - 1, sequence)]
    for older, before, torn in (same_length, ({"a": 1}, {"b": [1, 2]}, {"c": "x" * 300})):
        cells = [b"", b""]
        for back, content in ((2, older), (1, before)):
            number = sequence - back
            cells[number % 2] = record.pack(number, json.dumps(content).encode())
        new = record.pack(sequence, json.dumps(torn).encode())
        place = sequence % 2
        old = cells[place].ljust(size, b"\0")[: len(new)]
        for cut in range(len(new) + 1):
            for mixed in (new[:cut] + old[cut:], old[:cut] + new[cut:]):
                cells[place] = mixed
                data = b"".join(cell.ljust(size, b"\0") for cell in cells)
                newest = record._newest(data, 0, size)
                assert newest in ((sequence - 1, before), (sequence, torn)), cut


def test_a_write_never_touches_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "n1.rec"
    slot = Slot(path, "n1", 0, 1)
    for number in range(4):
        before = path.read_bytes()
        slot.process.write({"rank": 0, "number": number})
        after = bytearray(path.read_bytes())
        changed = [place for place, byte in enumerate(before) if after[place] != byte]
        if number:  # with what was written destroyed, the one before is the newest
            after[changed[0] : changed[-1] + 1] = bytes(changed[-1] + 1 - changed[0])
            (tmp_path / "torn.rec").write_bytes(after)
            assert one(tmp_path / "torn.rec").process["number"] == number - 1


def test_a_slot_opened_again_goes_on_after_the_newest_write(tmp_path: Path) -> None:
    path = tmp_path / "n1.rec"
    for number in range(5):
        Slot(path, "n1", 0, 1).process.write({"rank": 0, "number": number})
    assert one(path).process["number"] == 4


def test_a_record_too_big_for_its_cell_drops_the_least_needed_first(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "n1.rec", "n1", 0, 1)
    slot.process.write(
        {"rank": 0, "error": "E", "versions": {"torch": "2"}, "traceback": "t" * 9000}
    )
    assert one(tmp_path / "n1.rec").process == {
        "rank": 0,
        "error": "E",
        "versions": {"torch": "2"},
    }
    slot.process.write({"rank": 0, "phase": "running", "peak": 7, "strange": "s" * 9000})
    assert one(tmp_path / "n1.rec").process == {"rank": 0, "peak": 7}


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "not a record file"),
        (b"MTL", "not a record file"),
        (b"%PDF-1.7 something else", "not a record file"),
        (b"MTLREC02" + bytes(20000), "not a record file"),
        (b'MTLREC01{"format": 2, "node": "n1"}'.ljust(4096, b"\0"), "format 2"),
    ],
    ids=["empty", "cut in the magic", "foreign", "other magic", "future format"],
)
def test_a_file_of_another_kind_is_refused_by_name(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "n1.rec"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as raised:
        list(read_file(path))
    assert "n1.rec" in str(raised.value)


def test_a_truncated_file_yields_the_slots_that_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "n1.rec"
    for local_rank in range(3):
        slot = Slot(path, "n1", local_rank, 3)
        slot.process.write({"rank": local_rank})
        slot.exit.write({"rank": local_rank, "exit_code": local_rank})
    data = path.read_bytes()
    for cut in range(8, len(data), 997):
        path.write_bytes(data[:cut])
        for found in read_file(path):
            assert found.process in ({}, {"rank": found.local_rank})
            assert found.exit in ({}, {"rank": found.local_rank, "exit_code": found.local_rank})
    path.write_bytes(data[: 4096 + 16384 + 6144 + 3000])  # into the second cell of slot 1
    assert [found.rank for found in read_file(path)] == [0, 1]


def test_cells_of_a_future_version_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "n1.rec"
    Slot(path, "n1", 0, 1).process.write({"rank": 0})
    data = bytearray(path.read_bytes())
    start = data.index(b"CELL")
    data[start + 4] = 2
    path.write_bytes(data)
    assert list(read_file(path)) == []


def test_ranks_that_write_at_the_same_time_do_not_touch_each_other(tmp_path: Path) -> None:
    path = tmp_path / "records" / "n1.rec"
    writers = [writer(path, local_rank, 3000) for local_rank in range(4)]
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    found = list(read_file(path))
    assert [one.rank for one in found] == [0, 1, 2, 3]
    assert all(one.process["number"] == 3000 and one.exit["exit_code"] == 0 for one in found)


def test_a_writer_killed_in_the_middle_leaves_a_whole_record(tmp_path: Path) -> None:
    for attempt in range(5):
        path = tmp_path / f"{attempt}.rec"
        process = writer(path, 0, -1)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.01 + 0.013 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        found = one(path)
        assert found.process["number"] > 1
        assert found.process["twice"] == 2 * found.process["number"]
        assert len(found.process["filler"]) == found.process["number"] % 5000
        assert found.exit == {}


def test_readers_never_see_a_torn_record_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "n1.rec"
    process = writer(path, 0, -1)
    assert process.stdout is not None
    process.stdout.readline()
    last = 0
    for _ in range(300):
        found = list(read_file(path))
        # a reader may meet both cells half overwritten, if it is slower than two writes
        if found:
            content = found[0].process
            assert content["twice"] == 2 * content["number"] >= last
            last = content["number"]
    process.kill()
    process.communicate()
    assert last > 0
