"""What ranks tell each other arrives as it was said, and nothing of it is pickled."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.trainers.backends.parallel.regions import ShardedParameter
from millrace.trainers.backends.rank_messages import _read, exchange
from millrace.trainers.errors import TrainerError
from tests.support.house import ROOMS
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[3]
HELD = [ShardedParameter("a.weight", (4, 2), (("fs", 0), ("tp", 1)), 1), ShardedParameter("ä", (), (), None)]


def tell(backend: Any, rank: int, world: int, store: Any) -> list[dict[int, list[ShardedParameter]]]:
    backend.form(rank, world, store, 60.0)
    try:
        return exchange({rank: HELD * rank}, dict[int, list[ShardedParameter]])
    finally:
        backend.tear_down()


@pytest.mark.slow
def test_every_rank_hears_every_other_as_it_spoke() -> None:
    with Ranks(3) as ranks:
        for heard in ranks.run(tell, 3):
            assert heard == [{rank: HELD * rank} for rank in range(3)]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"x":[]}', b'{"0":[{"name":1}]}', b"\x80\x04N.", b'{"0":"\xff"}'])
def test_what_is_no_such_value_is_refused(text: bytes) -> None:
    sent = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(TrainerError, match="rank 2"):
        _read(sent, dict[int, list[ShardedParameter]], 2)


PICKLED = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def test_nothing_that_comes_over_a_line_is_pickled() -> None:
    """Neither a collective of objects, which torch pickles, nor pickle itself, anywhere but in tests."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
                assert not collective_of_objects(name), f"{path}: use millrace.trainers.backends.rank_messages"
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [one.name for one in node.names] + [getattr(node, "module", None) or ""]
                    assert PICKLED.isdisjoint(name.partition(".")[0] for name in names), path
                    assert not any(map(collective_of_objects, names)), path


def collective_of_objects(name: str) -> bool:
    verbs = ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    return name in {f"{verb}_object{more}" for verb in verbs for more in ("", "s", "_list")}


def test_a_collective_of_objects_is_known() -> None:
    import torch.distributed as dist

    objects = {name for name in dir(dist) if "object" in name and callable(getattr(dist, name))}
    assert objects, "torch has some"
    assert {name for name in objects if not collective_of_objects(name)} == set()
