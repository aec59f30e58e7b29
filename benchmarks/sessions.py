"""Fifty turns of a session beside renderers and TRL: tokens rendered and CPU time per turn, and whose history stays.

    python benchmarks/sessions.py --install DIR     # once: a venv with renderers 0.1.12 and TRL 1.16.0 (1.6 GB with torch)
    python benchmarks/sessions.py --peers DIR       # runs all sides, prints a table, writes benchmarks/sessions.json

One conversation of a model of the Qwen3 family with a tool: a call, its result of some 150 tokens, 50 times. The replies are
given, as token ids; in every fifth the model spells a word in other tokens than a tokenizer would, which sampling does. A turn
is what lies between a reply and the tokens of the next prompt: the reply is read (text, calls), and what follows is rendered.
Sides, each in one thread, one behind another; of each turn the median of ROUNDS, after a round that warms up:

- ours: a session as the server holds it (LiveSession), given the whole conversation each time, and `ours, HTTP`: the same
  through the server, by an OpenAI-like client, so with the JSON of the whole conversation written and read in every turn;
- renderers: bridge_to_next_turn of its Qwen3 renderer;
- TRL, suffix: what its GRPO trainer does behind a call, GRPOTrainer._get_tool_suffix_ids;
- TRL, template: its prefix-preserving training template (get_training_chat_template), the conversation rendered whole.

Milliseconds are of CPU, because neighbours on the machine change the wall's; nothing but the side itself runs between two
turns, or the caches would be colder the longer the conversation is. `tokens` are all ids that came out of the tokenizer in a
turn. `broken`: turns whose prompt does not begin with the prompt and the reply before it, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("torch==2.13.0", "trl==1.16.0", "renderers==0.1.12", "httpx==0.28.1", "openai==2.54.0")
OUTPUT = Path(__file__).with_suffix(".json")
TURNS, ROUNDS = 50, 5
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
LOOK = {
    "name": "look", "description": "The text of a page.",
    "parameters": {"type": "object", "properties": {"page": {"type": "string"}}, "required": ["page"]},
}  # fmt: skip
TOOLS = [{"type": "function", "function": LOOK}]
OPENING = [{"role": "system", "content": "You read pages."}, {"role": "user", "content": "What do the pages say?"}]


@dataclass(frozen=True)
class Turn:
    """What one turn cost a side."""

    tokens: int
    seconds: float
    before: list[int]
    """The prompt and the reply that were there; empty where nobody can see them."""
    prompt: list[int]

    @property
    def is_broken(self) -> bool:
        """The prompt does not begin with what was there."""
        return self.prompt[: len(self.before)] != self.before


Side = Callable[[Path, dict[str, Any]], Iterator[Turn]]


# --- the conversation


def make_talk(folder: Path) -> None:
    """A tokenizer and a conversation, for all sides alike."""
    import pydoc_data.topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = list(pydoc_data.topics.topics.values())
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=8000, special_tokens=[], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    ))  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[:3])})
    tokenizer.add_tokens(list(SPECIAL[3:]))
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = random.Random(0)
    words = " ".join(texts).split()
    turns = []
    for number in range(TURNS):
        at = rng.randrange(len(words) - 200)
        call = json.dumps({"name": "look", "arguments": {"page": f"{number:03d}"}})
        said = f"<think>\n\n</think>\n\nPage {number}.\n<tool_call>\n{call}\n</tool_call><|im_end|>"
        reply = tokenizer(said, add_special_tokens=False).input_ids
        if number % 5 == 4:
            reply = spelled_out(tokenizer, reply, "Page")
        turns.append({"reply": reply, "result": f"{number}: {' '.join(words[at : at + 80])}"})
    (folder / "talk.json").write_text(json.dumps({"turns": turns}))


def spelled_out(tokenizer: Any, reply: list[int], word: str) -> list[int]:
    """With a word letter by letter: other tokens, the same text."""
    whole = tokenizer(word, add_special_tokens=False).input_ids
    at = next(i for i in range(len(reply)) if reply[i : i + len(whole)] == whole)
    return [*reply[:at], *map(tokenizer.convert_tokens_to_ids, word), *reply[at + len(whole) :]]


# --- ours


def ours(folder: Path, talk: dict[str, Any]) -> Iterator[Turn]:
    """A session without HTTP: from what the model said to the tokens of the next prompt."""
    session, bodies = open_session(folder), requests_of(open_session(folder), talk)
    asks, seconds = [session.prepare(session.reader.read(bodies[0]))], []
    for turn, body in zip(talk["turns"], bodies[1:], strict=True):
        sampled = sampled_of(turn)
        begin = time.process_time()
        session.commit(asks[-1], sampled)
        ask = session.prepare(session.reader.read(body))
        seconds.append(time.process_time() - begin)
        asks.append(ask)
    known: list[int] = []
    for turn, asked, ask, took in zip(talk["turns"], asks, asks[1:], seconds, strict=False):
        known += [*asked.prompt, *turn["reply"]]
        yield Turn(len(ask.prompt), took, [*known], [*ask.at.parent.tokens(), *ask.prompt])


def requests_of(session: Any, talk: dict[str, Any]) -> list[dict[str, Any]]:
    """Decoded JSON of every request, as an agent sends them; no two share an object."""
    messages: list[dict[str, Any]] = [*OPENING]
    found = [json.dumps({"messages": messages, "tools": TOOLS})]
    for turn in talk["turns"]:
        ask = session.prepare(session.reader.read(json.loads(found[-1])))
        message = session.commit(ask, sampled_of(turn))["choices"][0]["message"]
        messages += [message, result_of(message["tool_calls"][0]["id"], turn)]
        found.append(json.dumps({"messages": messages, "tools": TOOLS}))
    return [json.loads(body) for body in found]


def open_session(folder: Path) -> Any:
    """A session as the server opens it."""
    from miles_core.rollout.chat import FAMILIES, FamilyRenderer
    from miles_core.rollout.sessions.live import LiveSession

    return LiveSession("s", "key", FamilyRenderer(load(folder), FAMILIES["qwen3"]), session_spec())


def sampled_of(turn: dict[str, Any]) -> Any:
    """A reply as the engine gives it."""
    from miles_core.records import Version
    from miles_core.rollout.sessions.history import Sampled

    n, version = len(turn["reply"]), Version(0, 0)
    return Sampled(tuple(turn["reply"]), (-1.0,) * n, (version,) * n, True, version, version)


def ours_http(folder: Path, talk: dict[str, Any]) -> Iterator[Turn]:
    """The same through the server; an engine that has its replies ready."""
    import httpx
    import numpy as np

    from miles_core.records import Version
    from miles_core.rollout.chat import FAMILIES, FamilyRenderer
    from miles_core.rollout.engine import Finished
    from miles_core.rollout.sessions.door import EngineDoor
    from miles_core.rollout.sessions.server import SessionServer

    class Engine:
        version, free_slots = Version(0, 0), 1

        def __init__(self) -> None:
            self.asked: list[Any] = []
            self.number = 0

        def add(self, request: Any) -> None:
            self.asked.append(request)

        def step(self) -> list[Finished]:
            tokens = np.array(talk["turns"][self.number % TURNS]["reply"], dtype=np.int32)
            self.number += 1
            logprobs = np.full(len(tokens), -1, dtype=np.float32)
            return [Finished(self.asked[-1].session_key, tokens, logprobs, (self.version,) * len(tokens), "end")]

        def release(self, session_key: str) -> None:
            pass

    import threading

    engine: Any = Engine()
    door, over = EngineDoor(engine), threading.Event()

    def drive() -> None:
        while not over.is_set():
            door.pump()
            door.wait(0.05)

    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    server = SessionServer(door, FamilyRenderer(load(folder), FAMILIES["qwen3"]), session_spec())
    with httpx.Client(trust_env=False, timeout=60) as client:
        opened = client.post(f"{server.url}/sessions", headers={"Authorization": f"Bearer {server.key}"}).json()
        messages: list[dict[str, Any]] = [*OPENING]
        url, headers = f"{opened['base_url']}/chat/completions", {"Authorization": f"Bearer {opened['key']}"}
        for number in range(TURNS + 1):
            begin = time.process_time()
            answer = client.post(url, json={"messages": messages, "tools": TOOLS}, headers=headers)
            seconds = time.process_time() - begin
            message = answer.raise_for_status().json()["choices"][0]["message"]
            if number:
                yield Turn(len(engine.asked[-1].tokens), seconds, [], [])
            messages += [message, result_of(message["tool_calls"][0]["id"], talk["turns"][number % TURNS])]
    server.stop()
    over.set()
    driver.join()


def session_spec() -> Any:
    """Limits that nothing here meets."""
    from miles_core.rollout.sessions.live import SessionSpec

    return SessionSpec(max_tokens=1 << 20, max_new_tokens=1 << 12, max_turns=TURNS + 2, temperature=1.0, seed=0)


def result_of(call_id: str, turn: dict[str, Any]) -> dict[str, Any]:
    """The tool's message."""
    return {"role": "tool", "tool_call_id": call_id, "name": "look", "content": turn["result"]}


def load(folder: Path) -> Any:
    """The tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "tokenizer")


# --- peers, in their own interpreter


def renderers_bridge(folder: Path, talk: dict[str, Any]) -> Iterator[Turn]:
    """The bridge of renderers; a bridge that is refused is a whole rendering."""
    from renderers import Qwen3RendererConfig, create_renderer

    renderer = create_renderer(load(folder), Qwen3RendererConfig())
    messages: list[dict[str, Any]] = [*OPENING]
    prompt = list(renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True))
    for turn in talk["turns"]:
        reply = list(turn["reply"])
        begin = time.process_time()
        parsed = renderer.parse_response(reply)
        result = result_of("c", turn)
        bridged = renderer.bridge_to_next_turn(prompt, reply, [result], tools=TOOLS)
        before = [*prompt, *reply]
        calls = [{"id": "c", "type": "function", "function": as_function(call)} for call in parsed.tool_calls]
        messages += [{"role": "assistant", "content": parsed.content, "tool_calls": calls}, result]
        if bridged is None:
            prompt = list(renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True))
            tokens = len(prompt)
        else:
            prompt = list(bridged.token_ids)
            tokens = len(prompt) - len(before)
        yield Turn(tokens, time.process_time() - begin, before, prompt)


def as_function(call: Any) -> dict[str, Any]:
    """A parsed call as OpenAI writes it."""
    return {"name": call.name, "arguments": call.arguments}


def trl_tokenizer(folder: Path) -> Any:
    """With the template of Qwen3 as TRL ships it, and its schema of replies."""
    from trl.chat_template_utils import add_response_schema, qwen3_chat_template

    tokenizer = load(folder)
    tokenizer.chat_template = qwen3_chat_template
    return add_response_schema(tokenizer)


def trl_suffix(folder: Path, talk: dict[str, Any]) -> Iterator[Turn]:
    """The trainer's way: the suffix of a small conversation that nobody held."""
    from types import SimpleNamespace

    from trl.chat_template_utils import get_training_chat_template, parse_response
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokenizer = trl_tokenizer(folder)
    counted = counting(tokenizer)
    trainer = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template=get_training_chat_template(tokenizer),
        chat_template_kwargs={}, tools=TOOLS,
    )  # fmt: skip
    prompt = whole(tokenizer, OPENING, trainer.chat_template)
    for turn in talk["turns"]:
        reply = list(turn["reply"])
        counted.clear()
        begin = time.process_time()
        parse_response(tokenizer, reply)
        suffix = GRPOTrainer._get_tool_suffix_ids(trainer, [result_of("c", turn)])
        before = [*prompt, *reply]
        prompt = [*before, *suffix]
        yield Turn(sum(counted), time.process_time() - begin, before, prompt)


def trl_template(folder: Path, talk: dict[str, Any]) -> Iterator[Turn]:
    """The whole conversation by the template that is made for training."""
    from trl.chat_template_utils import get_training_chat_template, parse_response

    tokenizer = trl_tokenizer(folder)
    template = get_training_chat_template(tokenizer)
    messages: list[dict[str, Any]] = [*OPENING]
    prompt = whole(tokenizer, messages, template)
    for turn in talk["turns"]:
        before = [*prompt, *turn["reply"]]
        begin = time.process_time()
        messages += [parse_response(tokenizer, list(turn["reply"])), result_of("c", turn)]
        prompt = whole(tokenizer, messages, template)
        yield Turn(len(prompt), time.process_time() - begin, before, prompt)


def whole(tokenizer: Any, messages: list[dict[str, Any]], template: str | None) -> list[int]:
    """All of a conversation."""
    found = tokenizer.apply_chat_template(
        messages, tools=TOOLS, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(found)


def counting(tokenizer: Any) -> list[int]:
    """Lengths of all that the tokenizer gives from now on."""
    lengths: list[int] = []
    render = tokenizer.apply_chat_template

    def counted(*arguments: Any, **named: Any) -> Any:
        found = render(*arguments, **named)
        ids = found["input_ids"] if hasattr(found, "keys") else found
        lengths.append(len(ids[0]) if ids and isinstance(ids[0], list) else len(ids))
        return found

    tokenizer.apply_chat_template = counted
    return lengths


OURS: dict[str, Side] = {"ours": ours, "ours, HTTP": ours_http}
PEERS: dict[str, Side] = {
    "renderers 0.1.12": renderers_bridge, "TRL 1.16.0, suffix": trl_suffix, "TRL 1.16.0, template": trl_template,
}  # fmt: skip


# --- the table


def play(side: str, folder: Path) -> list[list[float]]:
    """[tokens, seconds, is_broken] of each turn."""
    talk = json.loads((folder / "talk.json").read_text())
    turns = [*({**OURS, **PEERS}[side])(folder, talk)]
    return [[turn.tokens, turn.seconds, float(turn.is_broken)] for turn in turns]


def rounds_of(side: str, folder: Path) -> list[list[list[float]]]:
    """ROUNDS of them, after one that warms up."""
    return [play(side, folder) for _ in range(ROUNDS + 1)][1:]


def rounds_there(side: str, folder: Path, peers: Path) -> list[list[list[float]]]:
    """The same with the peers' interpreter."""
    command = [str(peers / "bin" / "python"), __file__, "--side", side, "--exchange", str(folder)]
    done = subprocess.run(command, check=True, timeout=1200, stdout=subprocess.PIPE, text=True)
    found: list[list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(side: str, rounds: list[list[list[float]]]) -> dict[str, Any]:
    """Turns 2 to 10 against turns 41 to 50; the first one warms caches up."""
    tokens = [turn[0] for turn in rounds[0]]
    ms = [1000 * statistics.median(turns[number][1] for turns in rounds) for number in range(TURNS)]
    early, late = statistics.median(ms[1:10]), statistics.median(ms[40:])
    return {
        "side": side, "tokens_turn_2": tokens[1], "tokens_turn_50": tokens[-1], "tokens_all": sum(tokens),
        "ms_turns_2_to_10": round(early, 3), "ms_turns_41_to_50": round(late, 3), "growth": round(late / early, 2),
        "broken": int(sum(turn[2] for turn in rounds[0])),
    }  # fmt: skip


def install(folder: Path) -> None:
    """A venv with the peers. Several GB where pip's default torch is the CUDA build: point pip at a CPU wheel first."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", *PACKAGES], check=True)


def compare(peers: Path) -> None:
    """All sides, one behind another."""
    from record import machine

    with tempfile.TemporaryDirectory() as name:
        make_talk(Path(name))
        rounds = {side: rounds_of(side, Path(name)) for side in OURS}
        rounds |= {side: rounds_there(side, Path(name), peers) for side in PEERS}
    rows = [row_of(side, seen) for side, seen in rounds.items()]
    print(
        f"{'side':22} {'tokens: turn 2':>14} {'turn 50':>8} {'all':>8} {'ms: 2-10':>9} {'41-50':>8} {'growth':>7} {'broken':>7}"
    )
    for row in rows:
        print(
            f"{row['side']:22} {row['tokens_turn_2']:14.0f} {row['tokens_turn_50']:8.0f} {row['tokens_all']:8.0f} "
            f"{row['ms_turns_2_to_10']:9.3f} {row['ms_turns_41_to_50']:8.3f} {row['growth']:7.2f} {row['broken']:7d}"
        )
    found = {
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "packages": PACKAGES,
        "turns": TURNS,
        "rounds": ROUNDS,
        "rows": rows,
    }
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="DIR")
    parser.add_argument("--peers", type=Path, metavar="DIR")
    parser.add_argument("--side", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--exchange", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(rounds_of(options.side, options.exchange)))
    elif options.install:
        install(options.install)
    elif options.peers:
        compare(options.peers)
    else:
        parser.error("give --install DIR or --peers DIR")


if __name__ == "__main__":
    main()
