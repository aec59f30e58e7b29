"""Deltas: exact for every dtype and bit pattern, as small as it gets, whole or refused; anchors where due (I11, I12)."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import DeadlineExceeded, DigestMismatch, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.policy import delta
from miles_core.policy.lineage import Lineage
from miles_core.policy.local_copy import PolicyCopy, read_version
from miles_core.policy.manifest import DELTA_NAME, MANIFEST_NAME, PolicyManifest, Probe, tensor_entries, weights_digest
from miles_core.policy.publisher import Publisher
from miles_core.policy.retention import retained
from miles_core.policy.tensors import RawTensor, read_safetensors, safetensors_header, to_raw, to_torch
from miles_core.recipe import PolicySpec
from miles_core.records import Published, Version
from miles_core.store.fs import FileSystem
from miles_core.store.publish import digest_bytes

RUN = "run-a"
PROBE = Probe(prompts=((1, 2),), logprobs=((-1.0,),), dtype="float32", tolerance=1e-3)
Tensors = dict[str, torch.Tensor]


def never_sleep(seconds: float) -> None:
    raise AssertionError("the reader waited for something that is no matter of time")


class Fleet:
    """A learner attempt that publishes, and readers of what it published."""

    def __init__(self, root: Path, attempt: int = 1, lineage: Lineage | None = None, **spec: Any) -> None:
        self.paths, self.attempt, self.lineage = RunPaths(root), attempt, lineage or Lineage()
        self.publisher = Publisher(FileSystem(), self.paths, PolicySpec(**spec), run_id=RUN, learner_token="t")

    def publish(self, step: int, tensors: Tensors) -> Published:
        """Writes a version and announces it."""
        prepared = self.publisher.prepare(Version(step, self.attempt), tensors, tensor_entries(tensors), PROBE)
        published = self.publisher.write(prepared)
        self.lineage.published[published.version] = published
        return published

    def copy(self, run_id: str = RUN) -> PolicyCopy:
        return PolicyCopy(self.paths, run_id, self.lineage, sleep=never_sleep)

    def manifest(self, published: Published) -> PolicyManifest:
        return PolicyManifest.model_validate_json((self.folder(published) / MANIFEST_NAME).read_bytes())

    def folder(self, published: Published) -> Path:
        return self.paths.resolve(published.folder)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def weights(seed: int = 0, size: int = 4096) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {
        "a.bf16": torch.randn(size, generator=draw).to(torch.bfloat16),
        "b.fp32": torch.randn(size // 8, 8, generator=draw),
        "c.scalar": torch.tensor(1.0),
        "d.empty": torch.empty(0, 3),
    }


def stepped(tensors: Tensors, step: int, share: float = 0.02) -> Tensors:
    """The same with a share of the elements of the large tensors moved a little."""
    draw = torch.Generator().manual_seed(1000 + step)
    moved = {}
    for name, tensor in tensors.items():
        chosen = torch.rand(tensor.shape, generator=draw) < share
        moved[name] = torch.where(chosen, tensor * 1.01 + 0.001, tensor) if tensor.numel() > 1 else tensor
    return moved


def same_bytes(found: Tensors, expected: Tensors) -> bool:
    return tensor_entries(found) == tensor_entries(expected)


# --- codec

WIDTHS = st.sampled_from([1, 2, 4, 8])


@st.composite
def changes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Any bytes before and after, equal but for some elements or different everywhere."""
    width, count, seed = draw(WIDTHS), draw(st.integers(0, 2000)), draw(st.integers(0, 2**32 - 1))
    share = draw(st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]))
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, count * width, dtype=np.uint8)
    new = old.copy()
    chosen = np.repeat(rng.random(count) < share, width)
    new[chosen] = rng.integers(0, draw(st.sampled_from([2, 256])), int(chosen.sum()), dtype=np.uint8)
    return old, new, width


@given(changes())
def test_what_is_decoded_is_what_was_encoded_and_never_larger(change):
    old, new, width = change
    before = old.copy()
    codec, payload = delta.encode(old, new, width)
    result = delta.decode(codec, payload, old, width)
    assert result.tobytes() == new.tobytes() and result.flags.owndata | (result.base is not None)
    assert (old == before).all() and not np.shares_memory(result, old)
    assert len(payload) <= new.nbytes


@pytest.mark.parametrize("codec", ["gap", "xor"])
@given(change=changes())
def test_both_codes_are_exact_whichever_is_smaller(codec, change):
    old, new, width = change
    before, after = delta._words(old, width), delta._words(new, width)
    changed = np.flatnonzero(before != after)
    payloads = {
        "gap": delta._encode_gaps(before, after, changed, width),
        "xor": delta._compress(delta._planes(before ^ after, width)),
    }
    assert delta.decode(codec, payloads[codec], old, width).tobytes() == new.tobytes()


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 65_535, 1_000_000])
def test_gaps_of_every_length_come_back(gap):
    old = np.zeros(2 * (gap + 2), np.uint8)
    new = old.copy()
    new[2 * gap] = new[2 * gap + 2] = 7
    codec, payload = delta.encode(old, new, 2)
    assert delta.decode(codec, payload, old, 2).tobytes() == new.tobytes()
    assert gap < 300 or len(payload) < 200


def test_few_changes_are_coded_as_gaps_many_whole_and_noise_raw():
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 20_000, dtype=np.uint16)
    few, many = old.copy(), old ^ rng.choice(np.array([1, 2], np.uint16), old.size)
    few[::100] ^= 1
    noise = rng.integers(0, 2**16, old.size, dtype=np.uint16)
    coded = {name: delta.encode(old.view(np.uint8), new.view(np.uint8), 2) for name, new in
             (("few", few), ("many", many), ("noise", noise))}  # fmt: skip
    assert [coded[name][0] for name in ("few", "many", "noise")] == ["gap", "xor", "full"]
    assert len(coded["few"][1]) < 0.01 * old.nbytes and len(coded["many"][1]) < 0.1 * old.nbytes


@settings(max_examples=300)
@given(change=changes(), seed=st.integers(0, 2**32 - 1))
def test_a_payload_that_is_cut_or_flipped_gives_other_bytes_or_is_refused_but_never_breaks(change, seed):
    old, new, width = change
    codec, payload = delta.encode(old, new, width)
    rng = np.random.default_rng(seed)
    if codec == "full" or not payload:
        return
    position = int(rng.integers(len(payload)))
    broken = payload[:position] if rng.random() < 0.5 else (
        payload[:position] + bytes([payload[position] ^ (1 << int(rng.integers(8)))]) + payload[position + 1 :]
    )  # fmt: skip
    with contextlib.suppress(DigestMismatch):
        assert len(delta.decode(codec, broken, old, width)) == old.nbytes


def test_a_payload_cannot_claim_more_memory_than_the_tensor_allows():
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    for codec in ("gap", "xor"):
        with pytest.raises(DigestMismatch, match="at most"):
            delta.decode(codec, bomb, np.zeros(16, np.uint8), 2)


# --- files of tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int64,
          torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16]  # fmt: skip


def test_other_tools_read_what_is_written_and_what_they_write_is_read():
    import safetensors.torch

    tensors = {f"t{i}": torch.arange(6).reshape(2, 3).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 2), 'naïve "name"': torch.ones(3)}
    raw = {name: to_raw(tensor) for name, tensor in tensors.items()}
    header, order = safetensors_header(raw)
    data = header + b"".join(raw[name].data.tobytes() for name in order)
    loaded = safetensors.torch.load(data)
    assert same_bytes(loaded, tensors)
    for written in (data, safetensors.torch.save(tensors, {"format": "pt"})):
        found = read_safetensors(written)
        assert same_bytes({name: to_torch(tensor) for name, tensor in found.items()}, tensors)


@pytest.mark.parametrize("data", [
    b"", b"\x00" * 8, b"\xff" * 40, b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
    b'\x3e\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}        ',
    b'\x3e\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}        ',
    b'\x3e\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"X99","shape":[1],"data_offsets":[0,4]}}        1234',
])  # fmt: skip
def test_what_is_no_file_of_tensors_is_refused(data):
    with pytest.raises(DigestMismatch, match="no safetensors file"):
        read_safetensors(data)


def test_an_unknown_dtype_is_refused_by_name():
    with pytest.raises(ValueError, match="complex128"):
        to_raw(torch.zeros(2, dtype=torch.complex128))


# --- publishing and following


def test_a_chain_leads_every_reader_to_the_same_bytes(fleet):
    tensors, follower = weights(), fleet.copy()
    for step in range(6):
        tensors = stepped(tensors, step)
        published = fleet.publish(step, tensors)
        assert (published.base is None) == (step == 0)
        for copy in (follower, fleet.copy()):
            found, manifest = copy.read(published)
            assert same_bytes(found, tensors) and weights_digest(found) == published.weights_digest
            assert manifest.version == copy.version == (step, 1)
    assert same_bytes(read_version(fleet.paths, RUN, published, fleet.lineage)[0], tensors)


def test_a_delta_holds_the_changed_tensors_only_and_says_what_they_were(fleet):
    first = weights()
    base = fleet.publish(0, first)
    second = {**first, "a.bf16": stepped(first, 1)["a.bf16"]}
    published = fleet.publish(1, second)
    manifest = fleet.manifest(published)
    assert manifest.kind == "delta" and manifest.base.version == (0, 1)
    assert manifest.base.weights_digest == base.weights_digest
    [change] = manifest.changes
    assert (change.name, change.codec, change.full_bytes) == ("a.bf16", "gap", 2 * 4096)
    assert (change.old_digest, change.new_digest) == (tensor_entries(first)[0].digest, tensor_entries(second)[0].digest)
    assert manifest.tensors == tensor_entries(second), "the full list: the digest is that of the whole version"
    sizes = [path.stat().st_size for path in fleet.folder(published).iterdir()]
    assert published.size_bytes == sum(sizes) < 0.2 * published.full_bytes


def test_full_bytes_are_those_of_an_anchor_to_the_byte(fleet, tmp_path):
    tensors = weights()
    anchor = fleet.publish(0, tensors)
    assert anchor.full_bytes == anchor.size_bytes == sum(p.stat().st_size for p in fleet.folder(anchor).iterdir())
    tensors = stepped(tensors, 1)
    as_delta = fleet.publish(1, tensors)
    as_anchor = Fleet(tmp_path / "other", deltas=False).publish(1, tensors)
    assert as_delta.base is not None and as_delta.full_bytes == as_anchor.full_bytes == as_anchor.size_bytes
    assert as_delta.weights_digest == as_anchor.weights_digest


def test_not_a_number_and_minus_zero_keep_their_bits(fleet):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    first = {"w": patterns.view(torch.bfloat16), "v": torch.zeros(40_000)}
    flipped = patterns.clone()
    flipped[::50] ^= -(2**15)
    second = {"w": flipped.view(torch.bfloat16), "v": torch.zeros(40_000).view(torch.int32).index_fill(
        0, torch.tensor([3, 5]), 0x7FC00123).view(torch.float32)}  # fmt: skip
    third = {"w": second["w"], "v": -torch.zeros(40_000)}
    copy = fleet.copy()
    for step, tensors in enumerate((first, second, third)):
        published = fleet.publish(step, tensors)
        assert (published.base is not None) == (step > 0)
        assert same_bytes(copy.read(published)[0], tensors)


def test_new_removed_reshaped_retyped_and_empty_tensors(fleet):
    big = {"big": torch.arange(4096.0)}
    chain = [
        {**big, "a": torch.ones(4), "gone": torch.ones(5), "e": torch.empty(0)},
        {**big, "a": torch.ones(2, 2), "new": torch.full((3,), 7.0), "e": torch.empty(0, 9), "new.empty": torch.empty(0)},
        {**big, "a": torch.ones(4, dtype=torch.int32), "gone": torch.ones(5), "s": torch.tensor(2.0)},
        {**big, "a": torch.ones(4, dtype=torch.int32).view(torch.float32), "s": torch.tensor(-0.0)},
    ]
    follower = fleet.copy()
    for step, tensors in enumerate(chain):
        published = fleet.publish(step, tensors)
        assert (published.base is None) == (step == 0)
        assert same_bytes(follower.read(published)[0], tensors) and same_bytes(fleet.copy().read(published)[0], tensors)
    second = fleet.manifest(fleet.lineage.published[Version(1, 1)])
    assert {change.name: (change.codec, change.old_digest) for change in second.changes} == {
        "a": ("full", None), "new": ("full", None), "e": ("full", None), "new.empty": ("full", None)
    }  # fmt: skip


def test_tied_weights_are_published_once(fleet):
    from tests.unit.tiny_models import tiny_model

    model = tiny_model(seed=0)
    tied = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor is model.get_input_embeddings().weight]
    assert len(tied) == 2, "the tiny model ties its head to its embeddings"
    state = {name: tensor.detach() for name, tensor in model.state_dict().items() if name != tied[1]}
    fleet.publish(0, {name: tensor.clone() for name, tensor in state.items()})
    state[tied[0]] = torch.where(torch.rand(state[tied[0]].shape) < 0.1, state[tied[0]] * 1.1, state[tied[0]])
    published = fleet.publish(1, state)
    assert [change.name for change in fleet.manifest(published).changes] == [tied[0]]
    assert same_bytes(fleet.copy().read(published)[0], state)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.01, 0.3, 1.0]))
def test_any_chain_is_followed_from_any_place_to_any_place(tmp_path_factory, seed, share):
    fleet = Fleet(tmp_path_factory.mktemp("chain"), anchor_every=4)
    rng, tensors = np.random.default_rng(seed), weights(seed, size=512)
    truth = {}
    for step in range(9):
        truth[step] = tensors = stepped(tensors, step, share)
        fleet.publish(step, tensors)
    assert sum(published.base is None for published in fleet.lineage.published.values()) >= 3
    copy = fleet.copy()
    for step in rng.integers(0, 9, 12).tolist():
        assert same_bytes(copy.read(fleet.lineage.published[Version(step, 1)])[0], truth[step])


# --- anchors


def anchors(fleet: Fleet) -> list[int]:
    return [version.step for version, published in fleet.lineage.published.items() if published.base is None]


def test_an_anchor_comes_every_so_many_versions(tmp_path):
    fleet, tensors = Fleet(tmp_path, anchor_every=4, anchor_ratio=100), weights()
    for step in range(10):
        tensors = stepped(tensors, step)
        fleet.publish(step, tensors)
    assert anchors(fleet) == [0, 4, 8]


def test_an_anchor_comes_before_the_chain_costs_more_than_the_ratio(tmp_path):
    fleet, tensors = Fleet(tmp_path, anchor_every=100, anchor_ratio=0.5), weights()
    for step in range(12):
        tensors = stepped(tensors, step, share=0.1)
        fleet.publish(step, tensors)
    full, spent = fleet.lineage.published[Version(0, 1)].full_bytes, 0
    assert len(anchors(fleet)) >= 2
    for published in fleet.lineage.published.values():
        spent = 0 if published.base is None else spent + published.size_bytes
        assert spent <= 0.5 * full


def test_a_change_that_is_not_worth_it_is_an_anchor(fleet):
    fleet.publish(0, weights(0))
    published = fleet.publish(1, weights(1))
    assert published.base is None and fleet.manifest(published).kind == "anchor"


def test_without_deltas_every_version_is_an_anchor(tmp_path):
    fleet, tensors = Fleet(tmp_path, deltas=False), weights()
    for step in range(3):
        fleet.publish(step, tensors)
    assert anchors(fleet) == [0, 1, 2]


def test_a_new_attempt_begins_with_an_anchor_and_its_readers_leave_the_old_branch(fleet):
    first = weights()
    fleet.publish(0, first)
    copy = fleet.copy()
    copy.read(fleet.publish(1, stepped(first, 1)))
    successor = Fleet(fleet.paths.root, attempt=2, lineage=fleet.lineage)
    again = stepped(first, 7)
    published = successor.publish(1, again)
    assert published.base is None
    assert same_bytes(copy.read(published)[0], again)
    third = stepped(again, 8)
    published = successor.publish(2, third)
    assert published.base == (1, 2) and same_bytes(copy.read(published)[0], third)


# --- refusals


def chain_of(fleet: Fleet, steps: int) -> list[tuple[Published, Tensors]]:
    tensors, made = weights(), []
    for step in range(steps):
        tensors = stepped(tensors, step)
        made.append((fleet.publish(step, tensors), tensors))
    return made


def test_a_delta_of_another_run_is_refused_with_both_names(fleet):
    published, _ = chain_of(fleet, 2)[1]
    with pytest.raises(RunDirectoryError, match="run run-a, this is run run-b"):
        fleet.copy(run_id="run-b").reach(published)


def test_a_delta_whose_base_nobody_announced_is_refused(fleet):
    chain = chain_of(fleet, 3)
    del fleet.lineage.published[Version(1, 1)]
    with pytest.raises(DigestMismatch, match=r"\(2, 1\) applies to \(1, 1\), which is no accepted version"):
        fleet.copy().reach(chain[2][0])


@pytest.mark.parametrize("base", [(1, 2), (2, 1), (3, 1)])
def test_a_base_of_another_attempt_or_not_before_it_is_refused(fleet, base):
    chain = chain_of(fleet, 4)
    fleet.lineage.published[Version(1, 2)] = chain[0][0]
    strange = chain[2][0].model_copy(update={"base": Version(*base)})
    with pytest.raises(DigestMismatch, match="no accepted version before it"):
        fleet.copy().reach(strange)


def test_a_record_that_names_another_base_than_the_manifest_is_refused(fleet):
    chain = chain_of(fleet, 3)
    strange = chain[2][0].model_copy(update={"base": Version(0, 1)})
    with pytest.raises(DigestMismatch, match=r"applies to Version\(step=1, attempt=1\)|applies to \(1, 1\)"):
        fleet.copy().reach(strange)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def test_a_flip_anywhere_in_a_delta_is_refused_and_the_copy_stays_usable(fleet):
    chain = chain_of(fleet, 3)
    copy = fleet.copy()
    copy.reach(chain[1][0])
    path = fleet.folder(chain[2][0]) / DELTA_NAME
    for position in (0, path.stat().st_size // 2, path.stat().st_size - 1):
        flip(path, position)
        with pytest.raises(DigestMismatch, match=r"delta\.bin"):
            copy.read(chain[2][0])
        assert same_bytes(copy.read(chain[1][0])[0], chain[1][1])
        flip(path, position)
    assert same_bytes(copy.read(chain[2][0])[0], chain[2][1])


def test_a_copy_that_was_changed_is_made_again_from_the_anchor(fleet):
    chain = chain_of(fleet, 4)
    copy = fleet.copy()
    found, _ = copy.read(chain[2][0])
    found["b.fp32"].view(torch.int32)[0, 0] ^= 1
    served, _ = copy.read(chain[3][0])
    assert same_bytes(served, chain[3][1])


class BreakingCopy(PolicyCopy):
    """Breaks off before the n-th tensor, as when memory runs out."""

    breaks_at = 0

    def _change(self, *arguments: Any) -> None:
        self.breaks_at -= 1
        if self.breaks_at == 0:
            raise MemoryError
        super()._change(*arguments)


def broken_off(fleet: Fleet, chain: list[tuple[Published, Tensors]], at: int) -> BreakingCopy:
    """A copy of version 1 in which the delta to version 3 broke off before its n-th tensor."""
    copy = BreakingCopy(fleet.paths, RUN, fleet.lineage, sleep=never_sleep)
    copy.reach(chain[1][0])
    copy.breaks_at = at
    with pytest.raises(MemoryError):
        copy.reach(chain[3][0])
    return copy


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("then", [0, 1, 2, 3, 4])
def test_a_delta_that_broke_off_is_taken_up_again_and_nothing_mixed_is_served(fleet, at, then):
    chain = chain_of(fleet, 5)
    copy = broken_off(fleet, chain, at)
    assert same_bytes(copy.read(chain[then][0])[0], chain[then][1])


def test_taking_up_a_delta_again_reads_no_anchor(fleet):
    chain = chain_of(fleet, 4)
    copy = broken_off(fleet, chain, at=2)
    shutil.rmtree(fleet.folder(chain[0][0]))
    assert same_bytes(copy.read(chain[3][0])[0], chain[3][1])


def test_a_reader_whose_deltas_are_gone_starts_again_from_the_newest_anchor(tmp_path):
    fleet = Fleet(tmp_path, anchor_every=4, anchor_ratio=100)
    chain = chain_of(fleet, 7)
    copy = fleet.copy()
    copy.reach(chain[1][0])
    for published, _ in chain[:4]:
        shutil.rmtree(fleet.folder(published))
    with pytest.raises(DeadlineExceeded, match=r"version \(2, 1\) was announced"):
        copy.reach(chain[2][0])
    assert same_bytes(copy.read(chain[6][0])[0], chain[6][1])


def test_following_reads_only_what_is_new(fleet):
    class Counting(FileSystem):
        def __init__(self) -> None:
            self.names: list[str] = []

        def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
            self.names.append(f"{path.parent.name}/{path.name}")
            return super().read(path, offset, limit)

        def listdir(self, path: Path) -> list[str]:
            raise AssertionError("the chain is found through records, never by listing")

    chain, fs = chain_of(fleet, 4), Counting()
    copy = PolicyCopy(fleet.paths, RUN, fleet.lineage, fs=fs, sleep=never_sleep)
    copy.reach(chain[2][0])
    fs.names.clear()
    copy.reach(chain[3][0])
    copy.reach(chain[3][0])
    assert fs.names == [f"v000003-a1/{MANIFEST_NAME}", f"v000003-a1/{DELTA_NAME}"]


def test_a_manifest_cannot_contradict_itself(fleet):
    manifest = fleet.manifest(chain_of(fleet, 2)[1][0])
    content = manifest.model_dump()
    for change in (
        {"kind": "anchor"},
        {"base": None},
        {"files": [{**content["files"][0], "size_bytes": content["files"][0]["size_bytes"] + 1}]},
        {"changes": [{**item, "new_digest": "0" * 32} for item in content["changes"]]},
    ):
        with pytest.raises(ValueError, match=r"delta|anchor|changes"):
            PolicyManifest.model_validate({**content, **change})


# --- retention


def announced(*versions: tuple[int, int, bool]) -> Lineage:
    lineage = Lineage()
    for step, attempt, is_anchor in versions:
        version = Version(step, attempt)
        lineage.published[version] = Published(
            version=version, weights_digest="", folder="", manifest_digest="", size_bytes=1,
            base=None if is_anchor else Version(step - 1, attempt),
        )  # fmt: skip
    return lineage


def test_the_two_newest_anchors_and_all_deltas_after_the_older_one_stay():
    lineage = announced(*[(step, 1, step % 4 == 0) for step in range(11)])
    assert retained(lineage.published) == {(step, 1) for step in range(4, 11)}
    assert retained(lineage.published, [Version(2, 1)]) == {(step, 1) for step in (0, 1, 2, *range(4, 11))}
    assert retained(lineage.published, [Version(99, 1), Version(5, 1)]) == retained(lineage.published)


def test_an_anchor_of_a_later_attempt_is_newer_whatever_its_step():
    lineage = announced((0, 1, True), (1, 1, False), (2, 1, True), (3, 1, False), (2, 2, True), (3, 2, False))
    assert retained(lineage.published) == {(2, 1), (3, 1), (2, 2), (3, 2)}
    assert retained(announced((0, 1, True), (1, 1, False)).published) == {(0, 1), (1, 1)} and retained({}) == set()


def test_what_is_retained_is_enough_for_every_retained_version(tmp_path):
    fleet = Fleet(tmp_path, anchor_every=3, anchor_ratio=100)
    chain = chain_of(fleet, 11)
    keep = retained(fleet.lineage.published, [Version(1, 1)])
    assert len(keep) < len(chain)
    for published, _ in chain:
        if published.version not in keep:
            shutil.rmtree(fleet.folder(published))
    for published, tensors in chain:
        if published.version in keep:
            assert same_bytes(fleet.copy().read(published)[0], tensors)


def test_raw_tensors_know_their_width():
    assert [RawTensor(name, (), np.zeros(0, np.uint8)).width for name in ("bfloat16", "float32", "bool")] == [2, 4, 1]


# --- forged manifests, whose own digest is right


def forge(fleet: Fleet, published: Published, change: Callable[[dict[str, Any]], None]) -> Published:
    """Changes a manifest and announces it."""
    path = fleet.folder(published) / MANIFEST_NAME
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
    return published.model_copy(update={"manifest_digest": digest_bytes(path.read_bytes())})


def test_a_delta_that_says_it_applies_to_other_weights_is_refused(fleet):
    def change(content: dict[str, Any]) -> None:
        content["base"]["weights_digest"] = "0" * 32

    with pytest.raises(DigestMismatch, match="applies to weights 0000"):
        fleet.copy().reach(forge(fleet, chain_of(fleet, 2)[1][0], change))


def test_a_delta_that_leaves_out_a_change_is_refused(fleet):
    def change(content: dict[str, Any]) -> None:
        del content["changes"][1:]
        content["files"][0].update(size_bytes=len(kept), digest=digest_bytes(kept))

    published = chain_of(fleet, 2)[1][0]
    path = fleet.folder(published) / DELTA_NAME
    kept = path.read_bytes()[: fleet.manifest(published).changes[0].size_bytes]
    path.write_bytes(kept)
    with pytest.raises(DigestMismatch, match="does not lead to its own tensors"):
        fleet.copy().reach(forge(fleet, published, change))


def test_a_delta_from_another_old_tensor_is_refused_by_name(fleet):
    def change(content: dict[str, Any]) -> None:
        content["changes"][1]["old_digest"] = "0" * 32

    with pytest.raises(DigestMismatch, match=r"b\.fp32 is neither the old nor the new"):
        fleet.copy().reach(forge(fleet, chain_of(fleet, 2)[1][0], change))


def test_a_delta_to_another_tensor_than_it_says_is_refused_by_name(fleet):
    def change(content: dict[str, Any]) -> None:
        content["changes"][1]["new_digest"] = content["tensors"][1]["digest"] = "0" * 32

    with pytest.raises(DigestMismatch, match=r"b\.fp32 became .*, announced 0000"):
        fleet.copy().reach(forge(fleet, chain_of(fleet, 2)[1][0], change))
