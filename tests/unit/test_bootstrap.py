"""The warm-up's parts: a tokenizer that loses nothing, demonstrations the environment agrees with, the same bytes twice."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from miles_core.bootstrap import WARM_UPS, bootstrap_digest, build, ensure_folder, find_warm_up
from miles_core.bootstrap.chain_sum import ChainSumDemonstrator, ChainSumHabits
from miles_core.bootstrap.tokenizer import END, SPECIAL_TOKENS, Messages, encode
from miles_core.bootstrap.training import WarmUp
from miles_core.environments.base import Message
from miles_core.environments.calculator import calculate
from miles_core.environments.reasoning_gym import ReasoningGymEnvironment
from miles_core.environments.tool_call import tool_call
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec
from miles_core.records import Version
from miles_core.rollout.session import ChatRenderer
from miles_core.rollout.torch_engine import TorchEngine

OPTIONS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
ENVIRONMENT = EnvironmentSpec(family="chain_sum", options=OPTIONS, tool="calculator", max_turns=3)
SMALL = WarmUp(ChainSumHabits(), hidden=32, layers=1, head_dim=8, mlp=32, clean_steps=4, careless_steps=3, batch=4)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return demonstrations().tokenizer()


def demonstrations() -> ChainSumDemonstrator:
    return ChainSumDemonstrator(ChainSumHabits(), 0, ENVIRONMENT)


def test_special_tokens_and_digits_stand_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [len(tokenizer.encode(token, add_special_tokens=False)) for token in SPECIAL_TOKENS] == [1] * 7
    assert tokenizer.tokenize("<tool_call>43 + 14</tool_call><|end|>-37") == [
        "<tool_call>", "4", "3", "Ġ+", "Ġ", "1", "4", "</tool_call>", "<|end|>", "-", "3", "7",
    ]  # fmt: skip
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")


def test_a_question_is_short(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(encode(tokenizer, demonstrations().clean())[0]) <= 50
    assert len(tokenizer) < 330


@pytest.mark.parametrize("text", ["", "  two  spaces\n\ttab", "Ünïcödé 数学 🦉", "</tool_call> 007 <|user|>", "x" * 300])
def test_any_text_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_the_template_is_role_content_end(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>1 + 1 =<|end|><|assistant|>2<|end|><|assistant|>"


def test_demonstrations_are_tokens_as_a_rollout_sees_them(tokenizer: PreTrainedTokenizerFast) -> None:
    user, call, tool, answer = demonstrations().clean()
    renderer = ChatRenderer(tokenizer)
    said = [tuple(tokenizer.encode(turn.content, add_special_tokens=False)) for turn in (call, answer)]
    expected = (
        *renderer.opening((user,)),
        *said[0],
        renderer.end_id,
        *renderer.continuation((tool,)),
        *said[1],
        renderer.end_id,
    )
    assert tuple(encode(tokenizer, (user, call, tool, answer))[0]) == expected


def test_the_loss_is_on_what_the_assistant_says(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = (Message("user", "9 - 4 ="), Message("assistant", "<tool_call>9 - 4</tool_call>"), Message("tool", "5"))
    ids, own = encode(tokenizer, (*messages, Message("assistant", "5")))
    said = [token for token, counts in zip(ids, own, strict=True) if counts]
    assert tokenizer.decode(said) == f"<tool_call>9 - 4</tool_call>{END}5{END}"


def replay(messages: Messages) -> tuple[Messages, str | None]:
    """Plays the assistant's turns against the real episode of the question; its answers and the final answer."""
    environment = ReasoningGymEnvironment(ENVIRONMENT)
    question = messages[0].content
    episode = environment.episode(0, "train")
    episode.task = replace(episode.task, question=question)
    turns = [message.content for message in messages if message.role == "assistant"]
    answers = tuple(message for turn in turns for message in asyncio.run(episode.respond(turn)))
    return (*episode.opening(), *answers), episode.final_answer


@pytest.mark.parametrize("careless", [False, True])
def test_the_environment_answers_as_the_demonstration_says(careless: bool) -> None:
    demonstrator = demonstrations()
    for _ in range(40):
        messages = demonstrator.careless() if careless else demonstrator.clean()
        heard, final = replay(messages)
        assert heard == tuple(message for message in messages if message.role != "assistant")
        assert final == messages[-1].content


def test_no_question_of_the_eval_split_is_demonstrated() -> None:
    environment = ReasoningGymEnvironment(ENVIRONMENT)
    held_out = {environment.episode(seed, "eval").task.question for seed in range(3000)}
    demonstrator = demonstrations()
    shown = {demonstrator.clean()[0].content for _ in range(3000)}
    short = {question for question in held_out | shown if len(question) < 69}
    assert len(short & held_out) > 20 and len(short & shown) > 60
    assert not held_out & shown


def kind(messages: Messages) -> str:
    """What a careless demonstration did wrong first."""
    if len(messages) == 2:
        return "guess"
    expression = messages[0].content.partition(": ")[2].removesuffix(" =")
    length = "long" if len(expression) > ChainSumHabits.long_characters else "short"
    if tool_call(messages[1].content) != expression:
        return f"cut {length}"
    return f"ignored {length}" if messages[3].content != calculate(expression) else f"right {length}"


def test_carelessness_has_its_rates() -> None:
    settings = ChainSumHabits()
    demonstrator = demonstrations()
    seen = Counter(kind(demonstrator.careless()) for _ in range(4000))
    assert seen["guess"] / 4000 == pytest.approx(settings.guess, abs=0.03)
    for length, cut in (("short", settings.cut), ("long", settings.cut_long)):
        calls = sum(seen[f"{what} {length}"] for what in ("cut", "ignored", "right"))
        assert seen[f"cut {length}"] / calls == pytest.approx(cut, abs=0.05)
    ignored, right = (sum(count for what, count in seen.items() if what.startswith(name)) for name in ("ignored", "right"))
    assert ignored / (ignored + right) == pytest.approx(settings.ignore, abs=0.05)
    assert 0.05 < right / 4000 < 0.4


def test_two_builds_give_the_same_bytes_and_load(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    build(SMALL, ENVIRONMENT, tmp_path / "a", lambda stage, share: told.append((stage, share)))
    build(SMALL, ENVIRONMENT, tmp_path / "b", lambda stage, share: None)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert [(tmp_path / "a" / name).read_bytes() for name in names] == [(tmp_path / "b" / name).read_bytes() for name in names]
    assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()
    assert [share for _, share in told] == pytest.approx([step / 7 for step in range(1, 8)])
    assert Counter(stage for stage, _ in told) == {"clean demonstrations": 4, "careless demonstrations": 3}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.dtype == torch.float32 and model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "a"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert ChatRenderer(AutoTokenizer.from_pretrained(tmp_path / "a")).end_id == model.config.eos_token_id


def test_a_warm_up_with_experts_makes_a_mixture(tmp_path: Path) -> None:
    mixture = replace(SMALL, experts=4, experts_per_token=2, expert_mlp=16)
    build(mixture, ENVIRONMENT, tmp_path / "a", lambda stage, share: None)
    build(mixture, ENVIRONMENT, tmp_path / "b", lambda stage, share: None)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    config = model.config
    assert (config.model_type, config.num_experts, config.num_experts_per_tok) == ("qwen3_moe", 4, 2) and config.norm_topk_prob
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 2 * 16, 32)
    assert config._experts_implementation in ("grouped_mm", "eager"), "batched_mm is many times slower"
    check_engine(model, tmp_path / "a")


def check_engine(model: torch.nn.Module, folder: Path) -> None:
    """The rollout engine takes the model, and forward passes agree."""
    engine = TorchEngine.from_folder(folder, dtype="float32", end_id=0, slots=1, max_tokens=32, version=Version(0, 0))
    ids = [9, 30, 7, 8, 12]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
    expected = expected.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(torch.from_numpy(engine.logprobs([ids])[0]), expected, atol=1e-5)


def test_the_warm_up_teaches_the_syntax(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """After 40 steps the first word of a turn is a call."""
    build(
        replace(SMALL, clean_steps=40, careless_steps=0, ramp_steps=5), ENVIRONMENT, tmp_path / "m", lambda stage, share: None
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    ids = ChatRenderer(tokenizer).opening((demonstrations().clean()[0],))
    with torch.no_grad():
        following = int(model(torch.tensor([ids])).logits[0, -1].argmax())
    assert following == tokenizer.convert_tokens_to_ids("<tool_call>")


def fill(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "m-1"
    assert ensure_folder(target, fill) == ensure_folder(target, lambda folder: pytest.fail("made again")) == target
    assert [path.name for path in target.parent.iterdir()] == ["m-1"]


def test_of_two_makers_at_once_one_wins_and_both_get_it(tmp_path: Path) -> None:
    target = tmp_path / "m-1"
    both_made = threading.Barrier(2, timeout=30)

    def make(folder: Path) -> None:
        fill(folder)
        both_made.wait()

    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(ensure_folder(target, make))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [target, target]
    assert [path.name for path in tmp_path.iterdir()] == ["m-1"]
    assert (target / "config.json").read_text() == "{}"


def test_a_failed_maker_leaves_nothing(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        ensure_folder(tmp_path / "m-1", make)
    assert list(tmp_path.iterdir()) == []


def test_the_key_follows_the_tasks_alone() -> None:
    key = bootstrap_digest("chain_sum", ENVIRONMENT)
    assert key == bootstrap_digest("chain_sum", ENVIRONMENT.model_copy(update={"max_new_tokens": 30}))
    assert key != bootstrap_digest("chain_sum", ENVIRONMENT.model_copy(update={"options": OPTIONS | {"max_digits": 3}}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("chainsum", {}, "there are: chain_sum, chain_sum_moe, chain_sum_wide, shell_puzzle, terminal"),
        ("chain_sum", {"family": "spell_backward"}, "family='spell_backward'"),
        ("chain_sum", {"tool": "none", "max_turns": 1}, "tool='none'"),
        ("chain_sum", {"max_turns": 1}, "max_turns=1"),
        ("shell_puzzle", {}, "family: shell_puzzle, options: {level: 1}, tool: shell and max_turns: 3 or more"),
    ],
)
def test_a_warm_up_that_does_not_fit_is_refused(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        find_warm_up(name, ENVIRONMENT.model_copy(update=changes))
    assert find_warm_up("chain_sum", ENVIRONMENT) is WARM_UPS["chain_sum"]
    assert find_warm_up("chain_sum_moe", ENVIRONMENT).experts == 16
