"""Policy versions: identity from content alone, whole or not at all, nothing foreign or changed is loaded (I1, I7, I11)."""

from __future__ import annotations

import errno
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_core.errors import DeadlineExceeded, DigestMismatch, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.policy.lineage import Lineage
from miles_core.policy.local_copy import read_version
from miles_core.policy.manifest import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    PolicyManifest,
    Probe,
    digest_entries,
    probe_prompts,
    tensor_entries,
    weights_digest,
)
from miles_core.policy.publisher import publish_version
from miles_core.policy.reader import check_probe
from miles_core.records import Published, StepDone, Version
from miles_core.store.follow import Delivered
from miles_core.store.fs import FileSystem
from miles_core.store.publish import digest_bytes

RUN = "run-a"
THIS = Version(3, 1)
PROBE = Probe(prompts=((1, 2, 3), (4, 5)), logprobs=((-1.0, -2.0), (-3.0,)), dtype="float32", tolerance=1e-3)


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.norm.weight": torch.randn(7, generator=draw),
        "model.embed.weight": torch.randn(3, 5, generator=draw).to(torch.bfloat16),
        "model.scale": torch.tensor(2.5),
    }


def publish(
    paths: RunPaths,
    version: Version = THIS,
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    run_id: str = RUN,
    fs: FileSystem | None = None,
    after_data: Callable[[], None] = lambda: None,
) -> Published:
    return publish_version(
        fs or FileSystem(), paths, run_id=run_id, version=version, tensors=tensors or make_tensors(), probe=PROBE,
        learner_token="token", after_data=after_data,
    )  # fmt: skip


def never_sleep(seconds: float) -> None:
    raise AssertionError("the reader waited for something that is no matter of time")


def read(paths: RunPaths, published: Published, run_id: str = RUN) -> tuple[dict[str, torch.Tensor], PolicyManifest]:
    return read_version(paths, run_id, published, sleep=never_sleep)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def folder_of(paths: RunPaths, published: Published) -> Path:
    return paths.resolve(published.folder)


# --- digests


def test_the_weights_digest_sees_names_dtypes_shapes_and_every_bit_and_no_order():
    tensors = make_tensors()
    digest = weights_digest(tensors)
    shuffled = list(tensors.items())
    random.Random(1).shuffle(shuffled)
    assert weights_digest(dict(shuffled)) == digest == digest_entries(tensor_entries(tensors)[::-1])
    embed = tensors["model.embed.weight"]
    flipped = embed.clone()
    flipped.view(torch.int16)[0, 0] ^= 1
    for changed in (
        {**tensors, "model.embed.weight": flipped},
        {**tensors, "model.embed.weight": embed.reshape(5, 3)},
        {**tensors, "model.embed.weight": embed.view(torch.float16)},
        {name.replace("norm", "morn"): tensor for name, tensor in tensors.items()},
        {name: tensor for name, tensor in tensors.items() if name != "model.scale"},
    ):
        assert weights_digest(changed) != digest


def test_the_weights_digest_does_not_depend_on_strides():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert weights_digest({"w": tensor.T}) == weights_digest({"w": tensor.T.contiguous()}) != weights_digest({"w": tensor})


@given(st.integers(min_value=2, max_value=200_000))
def test_probe_prompts_are_the_same_everywhere_and_within_the_vocabulary(vocabulary: int):
    prompts = probe_prompts(vocabulary)
    assert prompts == probe_prompts(vocabulary)
    assert all(0 <= token < vocabulary for prompt in prompts for token in prompt)
    assert len(prompts) >= 2 and all(len(prompt) >= 2 for prompt in prompts)


# --- publish and read


def test_a_published_version_comes_back_bit_for_bit(paths):
    tensors = make_tensors()
    published = publish(paths, tensors=tensors)
    found, manifest = read(paths, published)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert manifest.version == published.version == (3, 1) and manifest.kind == "anchor" and manifest.base is None
    assert manifest.weights_digest == published.weights_digest == weights_digest(tensors)
    assert manifest.learner_token == "token" and manifest.probe == PROBE
    assert published.size_bytes == sum(path.stat().st_size for path in folder_of(paths, published).iterdir())


def test_the_same_weights_give_the_same_files(paths, tmp_path):
    again = RunPaths(tmp_path / "again")
    one, two = publish(paths), publish(again)
    assert one == two
    for name in (WEIGHTS_NAME, MANIFEST_NAME):
        assert (folder_of(paths, one) / name).read_bytes() == (folder_of(again, two) / name).read_bytes()


def test_weights_carry_their_hugging_face_names_for_other_tools(paths):
    published = publish(paths)
    loaded = safetensors.torch.load_file(folder_of(paths, published) / WEIGHTS_NAME)
    assert loaded.keys() == make_tensors().keys()


class Crash(BaseException):
    """The end of the process."""


class CrashingFiles(FileSystem):
    """Ends the process at the n-th call that changes something."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise Crash

    def append(self, path: Path, data: bytes) -> None:
        self.calls += 1
        if self.calls == self.at:
            super().append(path, data[: len(data) // 2])
            raise Crash
        super().append(path, data)

    def sync(self, path: Path) -> None:
        self._count()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)


def test_whatever_a_crash_leaves_the_next_publication_of_the_same_version_is_whole(paths):
    complete = CrashingFiles(at=0)
    expected = publish(RunPaths(paths.root / "other"), fs=complete)
    assert complete.calls >= 8
    for at in range(1, complete.calls + 1):
        with pytest.raises(Crash):
            publish(paths, tensors=make_tensors(seed=at), fs=CrashingFiles(at))
        published = publish(paths)
        assert published == expected
        assert weights_digest(read(paths, published)[0]) == expected.weights_digest


def test_the_manifest_comes_after_the_data(paths):
    seen: list[list[str]] = []
    folder = paths.version(3, 1)
    publish(paths, after_data=lambda: seen.append(sorted(path.name for path in folder.iterdir())))
    assert seen == [[WEIGHTS_NAME]]


def test_a_version_of_another_run_is_refused_with_both_names(paths):
    published = publish(paths, run_id="run-b")
    with pytest.raises(RunDirectoryError, match=r"run run-b, this is run run-a"):
        read(paths, published)


def test_another_version_in_the_folder_is_refused_with_both_versions(paths):
    published, other = publish(paths), publish(paths, Version(4, 2))
    shutil.rmtree(folder_of(paths, published))
    shutil.copytree(folder_of(paths, other), folder_of(paths, published))
    with pytest.raises(RunDirectoryError, match=r"\(4, 2\), wanted \(3, 1\)"):
        read(paths, published)


def test_the_same_version_with_other_weights_is_refused(paths):
    published = publish(paths)
    publish(paths, tensors=make_tensors(seed=5))
    with pytest.raises(DigestMismatch, match="manifest was changed"):
        read(paths, published)


def test_a_manifest_that_is_torn_is_refused(paths):
    published = publish(paths)
    path = folder_of(paths, published) / MANIFEST_NAME
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DigestMismatch, match="no policy manifest"):
        read(paths, published)


def test_a_bit_flip_anywhere_in_the_weights_is_refused(paths):
    published = publish(paths)
    path = folder_of(paths, published) / WEIGHTS_NAME
    data = path.read_bytes()
    for position in (0, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(DigestMismatch, match=WEIGHTS_NAME):
            read(paths, published)
    path.write_bytes(data[:-1])
    with pytest.raises(DigestMismatch, match="torn or changed"):
        read(paths, published)


def forge(paths: RunPaths, published: Published, change: Callable[[dict], None]) -> Published:
    """Changes the manifest as somebody would who can also announce it: its own digest is right."""
    path = folder_of(paths, published) / MANIFEST_NAME
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
    return published.model_copy(update={"manifest_digest": digest_bytes(path.read_bytes())})


def test_tensors_that_differ_from_their_entries_are_refused_by_name(paths):
    def change(content: dict) -> None:
        content["tensors"][1]["digest"] = "0" * 32

    with pytest.raises(DigestMismatch, match=r"first model\.norm\.weight"):
        read(paths, forge(paths, publish(paths), change))


def test_a_tensor_that_the_manifest_does_not_name_is_refused(paths):
    def change(content: dict) -> None:
        del content["tensors"][2]

    with pytest.raises(DigestMismatch, match=r"first model\.scale"):
        read(paths, forge(paths, publish(paths), change))


def test_weights_of_another_digest_than_announced_are_refused(paths):
    published = publish(paths).model_copy(update={"weights_digest": "0" * 32})
    with pytest.raises(DigestMismatch, match="announced 0000"):
        read(paths, published)


def test_a_manifest_whose_sum_is_wrong_is_refused(paths):
    def change(content: dict) -> None:
        content["weights_digest"] = "0" * 32

    published = forge(paths, publish(paths), change).model_copy(update={"weights_digest": "0" * 32})
    with pytest.raises(DigestMismatch, match="the tensors make up weights"):
        read(paths, published)


def test_a_manifest_cannot_name_files_outside_its_folder(paths):
    def change(content: dict) -> None:
        content["files"][0]["name"] = "../../../etc/passwd"

    with pytest.raises(RunDirectoryError, match="outside its folder"):
        read(paths, forge(paths, publish(paths), change))


class LateFiles(FileSystem):
    """Reads fail for a while."""

    def __init__(self, error: int, failures: int) -> None:
        self.error, self.failures = error, failures

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        if self.failures > 0:
            self.failures -= 1
            raise OSError(self.error, "late", str(path))
        return super().read(path, offset, limit)


class SleepingClock:
    """A clock that only moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE])
def test_what_is_not_visible_yet_is_waited_for_within_a_deadline(paths, error):
    published, clock = publish(paths), SleepingClock()
    late = LateFiles(error, failures=5)
    tensors, _ = read_version(paths, RUN, published, fs=late, deadline_s=10.0, clock=clock, sleep=clock.sleep)
    assert weights_digest(tensors) == published.weights_digest and 0 < clock.now < 10
    never = LateFiles(error, failures=1_000_000)
    with pytest.raises(DeadlineExceeded, match=r"version \(3, 1\) was announced, but .*manifest.json .* in 10 s"):
        read_version(paths, RUN, published, fs=never, deadline_s=10.0, clock=clock, sleep=clock.sleep)


def test_other_failures_of_the_filesystem_are_not_hidden(paths):
    published = publish(paths)
    with pytest.raises(OSError, match="late"):
        read_version(paths, RUN, published, fs=LateFiles(errno.EIO, failures=1), sleep=never_sleep)


# --- probe


def manifest_with(probe: Probe) -> PolicyManifest:
    return PolicyManifest(
        run_id=RUN, version=Version(3, 1), weights_digest="", files=(), tensors=(), probe=probe, learner_token=""
    )


def test_the_probe_compares_the_mean_over_all_tokens_with_its_tolerance():
    manifest = manifest_with(PROBE)
    assert check_probe(manifest, [[-1.0, -2.0006], [-2.9997]]) == pytest.approx(0.0003)
    for wrong in ([[-1.0, -2.004], [-3.0]], [[-1.0, -2.0], [-2.996]], [[math.nan, -2.0], [-3.0]], [[-math.inf, -2.0], [-3.0]]):
        with pytest.raises(DigestMismatch, match=r"probe of policy version \(3, 1\)"):
            check_probe(manifest, wrong)


@pytest.mark.parametrize("answer", [[], [[-1.0, -2.0]], [[-1.0], [-3.0]], [[-1.0, -2.0, -1.0], [-3.0]]])
def test_a_probe_answered_with_other_lengths_fails(answer):
    with pytest.raises(DigestMismatch, match="lengths"):
        check_probe(manifest_with(PROBE), answer)


# --- lineage


def step(step: int, attempt: int, digest: str = "") -> Delivered:
    record = StepDone(step=step, batch_id="", manifest_digest="", weights_digest=digest, staleness=0, mean_reward=0)
    return Delivered(attempt, 0, record)


def announced(step: int, attempt: int) -> Delivered:
    version = Version(step, attempt)
    return Delivered(attempt, 0, Published(version=version, weights_digest="", folder="", manifest_digest="", size_bytes=0))


def test_of_several_attempts_at_a_step_the_highest_counts_and_all_versions_are_known():
    lineage = Lineage()
    assert lineage.newest_step == -1 and lineage.newest_published is None and lineage.published_at(0) is None
    for item in (step(0, 1, "base"), step(1, 1, "old"), step(2, 1, "only"), announced(1, 1), announced(2, 1)):
        lineage.fold(item)
    lineage.fold(step(1, 2, "new"))
    assert lineage.newest_step == 2
    assert [lineage.steps[k].weights_digest for k in range(3)] == ["base", "new", "only"]
    assert lineage.knows(Version(1, 1)) and lineage.knows(Version(1, 2)) and not lineage.knows(Version(2, 2))
    assert lineage.newest_published.version == (2, 1)
    lineage.fold(announced(1, 2))
    assert lineage.newest_published.version == lineage.published_at(1).version == (1, 2)
    assert lineage.published_at(2).version == (2, 1)
