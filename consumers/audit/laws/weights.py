"""Laws about weights: what a weight event says of its directory, as far as events alone tell it (`Weights`), and what
lies in the directory (`Files`, with `--files`).

Invariants: no code of those who write versions is used; what version 0 says of the policy, no later one contradicts;
what a live learner collects meanwhile is not missed; figures that are read from files are compared where the files are
those of the event, so that one cause is one violation."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import fsspec

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.infra.log.history.rows import Mark, Row
from millrace.infra.versions import locate
from millrace.schemas.records import LedgerEntry, WeightVersion
from millrace.trainers.weights.manifest import is_plain

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = ".safetensors"
"""how the names of files end that an engine loads where there is no index"""
TEMPLATE, TOKENIZER_SETTINGS = "chat_template.jinja", "tokenizer_config.json"
CHUNK = 1 << 20
ABSENCES = (errno.ENOENT, errno.ESTALE, None)
"""what a file that is not there says: also one removed by another machine under a reader, and stores without numbers"""
ADAPTER = "adapter_config.json"
TOKENIZER = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
DIGEST = re.compile(r"[0-9a-f]{64}")
IMITATES = "sft"
"""the algorithm that may learn from text without exact tokens"""
SelectionFacts = tuple[str | None, str | None, int | None, str | None, str | None, int | None, str | None]
"""text, digest and number of places of a selection, source and rubric of the rewards that it was trained on, and how
many replies of it were text, and in which form"""
NO_SELECTION: SelectionFacts = (None,) * 7


class Weights(Law):
    """A digest is that of the manifest of the files; the tokenizer is the policy's own from the first version on; the
    mode is what the files and the delta make it; the ledger was written at the same moment; and a branch alone, whose
    version 0 comes from another policy, is trained on a selection, all of it on the same one; where that holds text
    without exact tokens, it was imitated and nothing else."""

    name = "weights"
    sentence = "each weight event's digest, mode, tokenizer and directory follow from its files and its policy"
    unit = "versions"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._first: WeightVersion | None = None
        self._mark: Mark | None = None
        self._root: tuple[str, Mark] | None = None
        self._named: bool | None = None
        """whether the version before, unless it is 0, lies in a directory that a learner named"""
        self._selection: tuple[SelectionFacts, Mark] | None = None
        self._texts: dict[int, Mark] = {}
        """versions that were trained on text without exact tokens"""
        self._times: dict[int, tuple[int, Mark]] = {}
        self._sizes: dict[int, dict[str, int | None]] = {}
        """by version, what its entry's metrics repeat of the event"""

    def weights(self, row: Row[WeightVersion]) -> None:
        self.finding.checked += 1
        version = row["version"]
        self._times.setdefault(version, (row["time"], row.mark))
        size, delta = row["full_bytes"], row["delta_bytes"]
        self._sizes.setdefault(version, {"full_bytes": size, "sent_bytes": size if delta is None else delta})
        for problem in (*self._alone(row), *self._directory(row)):
            self.fail(f"version {version} {problem}", row, version=version)
        self._against_first(row)
        self._branch(row)

    def _alone(self, row: Row[WeightVersion]) -> list[str]:
        files, out = row["files"], []
        if row["policy"] != self.facts.policy or row.raw.key != row["policy"].encode():
            out.append(f"is of policy {row['policy']}, under key {row.raw.key!r}")
        first = _policy(self._first or row.record)
        names = [name for name, value in _policy(row.record).items() if value is not None and value != first[name]]
        if names:
            out.append(f"says another {', '.join(names)} than version 0")
        if not row["version"] and row["shards"] not in (None, len(self.facts.starts["trajectories"])):
            out.append(f"says {row['shards']} shards, there are {len(self.facts.starts['trajectories'])}")
        mode = "adapter" if ADAPTER in files else "delta" if row["delta"] is not None else "full"
        if row["mode"] != mode:
            out.append(f"is called {row['mode']}, but its files make it {mode}")
        if len({part is None for part in (row["delta"], row["delta_hash"], row["delta_bytes"])}) != 1:
            out.append("names a delta only in part")
        if row["delta_bytes"] is not None and not 0 < row["delta_bytes"] < (row["full_bytes"] or 1 << 62):
            out.append("has a delta that is no smaller than itself")
        if files:
            listing = json.dumps({"format": 1, "files": dict(sorted(files.items()))}, indent=1) + "\n"
            if hashlib.sha256(listing.encode()).hexdigest() != row["digest"]:
                out.append("has a digest that is not the one of its files")
        return out

    def _directory(self, row: Row[WeightVersion]) -> list[str]:
        """Directories of a policy lie side by side and carry version and digest in their names; those that were made
        since the deployment was moved lie where it is now. Version 0 may lie anywhere."""
        root, _, name = row["uri"].rstrip("/").rpartition("/")
        is_named = name.startswith("v")
        out = []
        if row["version"]:
            if self._named not in (None, is_named):
                out.append(f"lies in {row['uri']!r}: of its policy, learners named some directories and not others")
            self._named = is_named
        if not is_named:
            return out
        if row["delta"] is not None and row["delta"] != f"{root}/deltas/{name}.delta":
            out.append("has a delta that does not lie where those of its policy do")
        if name != f"v{row['version']}-{row['digest'][:12]}":
            out.append(f"lies in {name}, which is named for another version or digest")
        if self._root is None:
            self._root = (root, row.mark)
        elif root not in (self._root[0], self.facts.root.rstrip("/")):
            out.append(f"lies under {root}, the first under {self._root[0]}")
        return out

    def _branch(self, row: Row[WeightVersion]) -> None:
        """What a version says of another policy, or of a selection that it was trained on."""
        version, selection_facts, first = row["version"], _selection_facts(row.record), self._first or row.record
        if row["text_replies"] is not None:
            self._texts.setdefault(version, row.mark)
        if version and row["parent_policy"] is not None:
            message = f"version {version} names a parent in {row['parent_policy']}; only version 0 may have one there"
            self.fail(message, row, version=version)
        if selection_facts == NO_SELECTION:
            return
        selection, digest, places, source, rubric, replies, form = selection_facts
        if first["parent_policy"] is None:
            self.fail(f"version {version} names a selection, but its policy is no branch", row, version=version)
        elif selection is None or digest is None or places is None or (source is None) != (rubric is None):
            self.fail(f"version {version} names a selection only in part", row, version=version)
        elif (replies is None) != (form is None) or (replies is not None and (replies < 1 or not form)):
            self.fail(f"version {version} names text without its form or its number", row, version=version)
        elif not DIGEST.fullmatch(digest) or places < 1:
            self.fail(f"version {version} names a selection of nothing", row, version=version)
        elif self._selection is None:
            self._selection = selection_facts, row.mark
        elif self._selection[0] != selection_facts:
            message = f"version {version} names another selection than the first version of the branch that names one"
            self.fail(message, self._selection[1], row, version=version)

    def _against_first(self, row: Row[WeightVersion]) -> None:
        """What the learner copies from version to version."""
        version = row["version"]
        if self._first is None:
            self._first, self._mark = row.record, row.mark
        assert self._mark is not None
        first = _texts(self._first)
        for name, value in _texts(row.record).items():
            if value != first[name]:
                self.fail(f"version {version} has another {name} than the first", self._mark, row, version=version)
        tokenizer_files = {name: row["files"][name] for name in TOKENIZER if name in row["files"]}
        if not tokenizer_files:
            return
        if version == 0 and hashlib.sha256(json.dumps(tokenizer_files).encode()).hexdigest() != row["tokenizer_hash"]:
            self.fail("version 0 has a tokenizer_hash that is not the one of its files", row, version=version)

    def ledger(self, row: Row[LedgerEntry]) -> None:
        version = row["version"]
        if row.raw.key != str(version).encode():
            self.fail(f"the entry of version {version} lies under key {row.raw.key!r}", row, version=version)
        first = self._first
        if not version and first and not first["version"] and first["eta"] not in (None, row["eta"]):
            self.fail(f"version 0 says eta {row['eta']} in the ledger; its event says {first['eta']}", row, version=0)
        if version in self._texts and (used := _algorithm(row.record)) != IMITATES:
            message = f"version {version} was trained on text without exact tokens by {used or 'nobody knows what'}"
            self.fail(f"{message}: only {IMITATES} may", self._texts[version], row, version=version)
        event = self._times.get(version)
        if event is not None and event[0] != row["time"]:
            message = f"version {version} has another time in its event than in the ledger"
            self.fail(message, event[1], row, version=version)
        for name, size in self._sizes.get(version, {}).items():
            figure = row["metrics"].get(name)
            if figure is not None and size is not None and figure != size:
                message = f"version {version} says {name} {figure:g} in the ledger; its event says {size}"
                self.fail(message, *([event[1]] if event else []), row, version=version)


def _policy(event: WeightVersion) -> dict[str, int | None]:
    """What version 0 says of the policy."""
    sizes = {"shards": event["shards"], "group_size": event["group_size"]}
    return {"batch": event["batch"], "eta": event["eta"], **sizes}


def _texts(event: WeightVersion) -> dict[str, str | None]:
    """What makes tokens of a text."""
    return {"tokenizer_hash": event["tokenizer_hash"], "template_hash": event["template_hash"]}


def _selection_facts(event: WeightVersion) -> SelectionFacts:
    selection = event["selection"], event["selection_digest"], event["selection_places"]
    rewards = event["reward_source"], event["reward_rubric"]
    return *selection, *rewards, event["text_replies"], event["text_form"]


def _algorithm(entry: LedgerEntry) -> str | None:
    """What trained a version, as the configuration in its entry says."""
    try:
        return str(json.loads(entry["config"])["learner"]["algorithm"])
    except (ValueError, LookupError, TypeError):
        return None


class Files(Law):
    """A directory of a version that was not collected holds every file of its event with its hash, and its manifest
    hashes to the digest; its weight files are as large as the event says, no other one is beside them, and the chat
    template of version 0 is the policy's. A delta that is there is the event's. Collected versions are counted, not
    missed, also those that go meanwhile; the newest version must be there, that of the log as it is now where the
    walk's was collected since. Directories whose recorded path is not there are looked for where the policy's versions
    lie now."""

    name = "files"
    sentence = "checkpoint directories hold exactly the bytes that their weight events name"
    unit = "files"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._collected = 0
        self._newest: Row | None = None
        self._found: set[int] = set()

    def weights(self, row: Row[WeightVersion]) -> None:
        if self.facts.root:
            row = Row(row.raw, row.name, locate(row.record, self.facts.root), row.value, row.kind)
        version = row["version"]
        self._newest = row
        filesystem, root = fsspec.core.url_to_fs(row["uri"])
        outside = [name for name in row["files"] if not is_plain(name)]
        for name in outside:
            self.fail("the event names a file outside its directory", row, version=version, file=name)
        problems = [
            (message, name)
            for name, digest in {**row["files"], MANIFEST: row["digest"]}.items()
            if name not in outside and (message := _file_problem(filesystem, root, row, name, digest))
        ]
        problems += [(message, "") for message in (() if problems or outside else _figures(filesystem, root, row))]
        if row["delta"] is not None and (message := _delta(row)):
            problems.append((message, ""))
        if not filesystem.exists(root):  # asked last: a live learner may have collected it while its files were read
            self._collected += 1
            return
        self._found.add(version)
        self.finding.checked += len(row["files"]) + 1
        for message, name in problems:
            self.fail(message, row, version=version, **({"file": name} if name else {}))

    def finish(self) -> None:
        while (row := self._newest) and row["version"] not in self._found:
            later = self.facts.latest("weights")
            if later is None or later["version"] <= row["version"]:
                message = f"the newest version {row['version']} has no directory {row['uri']}"
                self.fail(message, row, version=row["version"])
                break
            self.weights(later)
        self.finding.facts |= {"directories": len(self._found), "collected": self._collected}


def _file_problem(filesystem: Any, root: str, row: Row, name: str, digest: str) -> str:
    """What is wrong with a file of a version; empty when it is as its event says."""
    try:
        file_digest = _sha256(filesystem, f"{root}/{name}")
    except OSError as error:
        if error.errno not in ABSENCES:
            raise
        return f"version {row['version']} has no {name} under {row['uri']}"
    if file_digest == digest:
        return ""
    return f"{name} of version {row['version']} hashes to {file_digest[:12]}, its event says {digest[:12]}"


def _figures(filesystem: Any, root: str, row: Row[WeightVersion]) -> Iterator[str]:
    """What an event says of its files' content and the files do not, given that they are those of the event. A
    directory that goes meanwhile says nothing."""
    version = row["version"]
    try:
        there = {str(path).rstrip("/").rpartition("/")[2] for path in filesystem.ls(root, detail=False)}
        more = sorted(name for name in there - {*row["files"]} if name.endswith(WEIGHTS))
        if more:
            yield f"version {version} has {', '.join(more)} beside its files: an engine loads it as weights"
        size = sum(filesystem.size(f"{root}/{name}") for name in _weights(filesystem, root, row))
        if row["full_bytes"] not in (None, size):
            yield f"version {version} says {row['full_bytes']} bytes of weights, its files hold {size}"
        if version == 0 and row["template_hash"] != (template := _template(filesystem, root, row)):
            yield f"version 0 says chat template {row['template_hash'][:12]}, its files hold {template[:12]}"
    except OSError as error:
        if error.errno not in ABSENCES:
            raise


def _weights(filesystem: Any, root: str, row: Row[WeightVersion]) -> list[str]:
    """Names of the files from which an engine loads tensors."""
    if INDEX in row["files"]:
        return sorted({*json.loads(filesystem.cat_file(f"{root}/{INDEX}"))["weight_map"].values()})
    return [name for name in row["files"] if name.endswith(WEIGHTS)]


def _template(filesystem: Any, root: str, row: Row[WeightVersion]) -> str:
    """sha256 hex of the chat template: its own file, or what the tokenizer's settings hold; of nothing without one."""
    if TEMPLATE in row["files"]:
        return hashlib.sha256(filesystem.cat_file(f"{root}/{TEMPLATE}")).hexdigest()
    has_settings = TOKENIZER_SETTINGS in row["files"]
    settings = json.loads(filesystem.cat_file(f"{root}/{TOKENIZER_SETTINGS}")) if has_settings else {}
    template = settings.get("chat_template")
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True) if template else ""
    return hashlib.sha256(text.encode()).hexdigest()


def _delta(row: Row[WeightVersion]) -> str:
    """What is wrong with a version's delta; empty when it is as its event says, or was collected."""
    filesystem, path = fsspec.core.url_to_fs(row["delta"])
    try:
        size, digest = filesystem.size(path), _sha256(filesystem, path)
    except OSError as error:
        if error.errno not in ABSENCES:
            raise
        return ""
    event_facts = (row["delta_bytes"], row["delta_hash"])
    if event_facts == (size, digest):
        return ""
    return f"the delta of version {row['version']} has {size} bytes and hash {digest[:12]}, its event says otherwise"


def _sha256(filesystem: Any, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
