"""Exports read by the loaders that they are for: verl's datasets, verifiers' reader of results, the API of Atropos.

None of these is a dependency of ours, so each test is skipped where its package is not. To repeat them, give each an
environment of its own that sees this one:

    for peer in verl 'verifiers<0.2' atroposlib; do
        python -m venv peer
        echo "import site; site.addsitedir('$PWD/.venv/lib/python3.11/site-packages')" > \\
            peer/lib/python3.11/site-packages/ours.pth
        peer/bin/pip install --no-deps "$peer" ray tensordict==0.10.0 torchdata codetiming pyvers hydra-core \\
            omegaconf antlr4-python3-runtime==4.9.3 jsonlines
        peer/bin/python -m pytest -rs tests/formats/layouts/test_peers.py
        rm -r peer
    done

docs/reading.md has the versions that were read so. prime-rl is no package of an index; its fields are compared in
test_layouts.py.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.formats.layouts.test_writers import Rows, clear, written
from tests.support.chat_tokenizer import write

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write(folder)
    return AutoTokenizer.from_pretrained(folder)


def spoken(messages: Rows) -> list[str]:
    """What the assistant says in a conversation."""
    return [message["content"] or "" for message in messages if message["role"] == "assistant"]


def test_verl_trains_on_what_the_assistant_said(tmp_path: Path, tokenizer: Any) -> None:
    datasets = pytest.importorskip("verl.utils.dataset.multiturn_sft_dataset")
    from omegaconf import OmegaConf

    _, rows = written("verl", tmp_path, clear(0))
    config = OmegaConf.create({"max_length": 4096, "ignore_input_ids_mismatch": True})
    read = datasets.MultiTurnSFTDataset(str(tmp_path / "verl"), tokenizer, config)
    assert len(read) == len(rows) > 0
    for at, row in enumerate(rows):
        item = read[at]
        trained = tokenizer.decode(item["input_ids"][item["loss_mask"] == 1])
        said = spoken(row["messages"])
        assert said
        assert all(text in trained for text in said)
        assert trained.count("<|im_end|>") == len(said), "each reply ends, and nothing else is trained"
        assert not [m for m in row["messages"] if m["role"] in ("system", "user") and m["content"] in trained]


def test_verl_asks_the_prompts_again(tmp_path: Path, tokenizer: Any) -> None:
    datasets = pytest.importorskip("verl.utils.dataset.rl_dataset")
    from omegaconf import OmegaConf

    _, rows = written("verl", tmp_path, clear(0))
    (tmp_path / "verl").rename(tmp_path / "verl.parquet")  # it tells the form of a file by its name
    config = OmegaConf.create({"max_prompt_length": 4096, "cache_dir": str(tmp_path), "filter_overlong_prompts": False})
    read = datasets.RLHFDataset([str(tmp_path / "verl.parquet")], tokenizer, config)
    assert len(read) == len(rows) > 0
    for at, row in enumerate(rows):
        item = read[at]
        asked = [(message["role"], message["content"]) for message in item["raw_prompt"]]
        assert asked == [(message["role"], message["content"]) for message in row["prompt"]]
        assert item["index"] == at
        assert item["extra_info"]["reward"] == row["extra_info"]["reward"]
        assert (item["data_source"], item["reward_model"]["style"]) == (row["data_source"], "rule")


def test_verifiers_reads_the_results(tmp_path: Path) -> None:
    saved = pytest.importorskip("verifiers.utils.save_utils")
    _, rows = written("verifiers", tmp_path, clear(0))
    (tmp_path / "verifiers").rename(tmp_path / "results.jsonl")
    read = saved.load_outputs(tmp_path)
    assert [dict(one) for one in read] == rows
    assert rows
    metadata: Any = {"env_id": "history", "model": "pico"}
    made = saved.make_dataset({"outputs": read, "metadata": metadata})
    assert made["reward"] == [row["reward"] for row in rows]
    assert Counter(made["example_id"]) == Counter(row["example_id"] for row in rows)


def test_the_api_of_atropos_takes_every_group_and_gives_it_to_its_trainer(tmp_path: Path) -> None:
    server = pytest.importorskip("atroposlib.api.server")
    from starlette.testclient import TestClient

    _, rows = written("atropos", tmp_path, clear(0))
    count = sum(len(row["tokens"]) for row in rows)
    trainer: dict[str, Any] = {"wandb_group": "g", "wandb_project": "p", "batch_size": count, "max_token_len": 4096}
    trainer |= {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1}
    with TestClient(server.app) as api:
        assert api.post("/register", json=trainer).status_code == 200
        for row in rows:
            answer = api.post("/scored_data", json=row)
            assert (answer.status_code, answer.json()["status"]) == (200, "received"), answer.text
        batch = api.get("/batch").json()["batch"]
    fields = ("tokens", "masks", "scores", "inference_logprobs", "messages", "overrides", "group_overrides")
    given = sorted(batch, key=lambda row: row["group_overrides"]["group"])
    assert [{name: row[name] for name in fields} for row in given] == sorted(
        rows, key=lambda row: row["group_overrides"]["group"]
    )
