"""An Engine in plain PyTorch: continuous batching over a Hugging Face causal language model.

One step is one forward pass over a pack: the newest token of every running session, plus the unread tokens of sessions
that start or go on with a turn. A finished row leaves the pack at once. A prompt's beginning that another slot holds under
the weights now loaded is copied instead of computed (prefixes.py). Failure: weights that do not fit are refused with their
names and nothing changes; logits that are not finite raise, for they would poison every later token.

The draw of a token depends on (seed of the sample, position) alone, never on its neighbours in the batch.
"""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from miles_core.adapters import Merger
from miles_core.errors import MilesError, RecipeError
from miles_core.recipe import LoraSpec
from miles_core.records import Version
from miles_core.rollout.engine import Counts, Finished, Request
from miles_core.rollout.expert_record import ExpertRecord
from miles_core.rollout.prefixes import HeldPrefixes
from miles_core.rollout.slots import ATTENTION, Ints, Pack, SlotCache
from miles_core.routers import find_routers

SUPPORTED = ("llama", "mixtral", "olmoe", "qwen3", "qwen3_moe")
PREFILL_TOKENS_PER_STEP = 512
"""Unread tokens read in one step beside the decoding rows, so that a step stays short; one longer chunk is read whole."""
LOGPROB_SEQUENCES = 16
LOGIT_ELEMENTS = 1 << 24
_MASK64 = (1 << 64) - 1


class TorchEngine:
    """See module. `model` is taken over: its attention is exchanged and its gradients are switched off.

    `weights_dtype`: of the weights that are published for it; the engine casts them to its model's. `record_experts`: a
    finished turn says which experts its positions went to; a dense model has none and pays nothing. `merger`: what is published
    are adapters of its base weights.
    """

    def __init__(
        self,
        model: Any,
        *,
        end_id: int,
        slots: int,
        max_tokens: int,
        version: Version,
        weights_dtype: str | None = None,
        record_experts: bool = False,
        merger: Merger | None = None,
        device: str = "cpu",
    ) -> None:
        _check_model(model.config, max_tokens)
        self._model = model.to(device).eval().requires_grad_(False)
        self._model.set_attn_implementation(ATTENTION)
        self._device = torch.device(device)
        self._end_id = end_id
        self._max_tokens = max_tokens
        self._cache = SlotCache(model.config, slots=slots, positions=max_tokens, dtype=model.dtype, device=self._device)
        self._merger = merger
        self._weights_dtype = model.dtype if weights_dtype is None else getattr(torch, weights_dtype)
        routers = find_routers(model) if record_experts else None
        self._experts = None if routers is None else ExpertRecord(routers, slots=slots, positions=max_tokens)
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self._device)
        self.version, self._versions = version, [version]
        self._slot_of: dict[str, int] = {}
        self._key_of: dict[int, str] = {}
        self._free = list(range(slots))
        self._arrivals = 0
        self.counts = Counts()
        self._running = np.zeros(slots, dtype=bool)
        self._arrival = np.zeros(slots, dtype=np.int64)
        self._cached = np.zeros(slots, dtype=np.int64)
        self._total = np.zeros(slots, dtype=np.int64)
        self._first = np.zeros(slots, dtype=np.int64)
        self._start = np.zeros(slots, dtype=np.int64)
        self._limit = np.zeros(slots, dtype=np.int64)
        self._seed = np.zeros(slots, dtype=np.uint64)
        self._temperature = np.zeros(slots, dtype=np.float32)
        self._tokens = np.zeros((slots, max_tokens), dtype=np.int64)
        self._held = HeldPrefixes(self._tokens)
        self._logprobs = np.zeros((slots, max_tokens), dtype=np.float32)
        self._version_of = np.zeros((slots, max_tokens), dtype=np.int64)

    @classmethod
    def from_folder(cls, folder: Path, *, dtype: str, lora: LoraSpec | None = None, **settings: Any) -> TorchEngine:
        """Loads a model folder in Hugging Face layout to compute in `dtype`; settings as for the class. Raises RecipeError.

        `lora`: what is published are adapters of this model.
        """
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        merger = None
        if lora is not None:
            published = settings.get("weights_dtype") or dtype
            is_same = published == dtype
            base = model if is_same else AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, published))
            merger = Merger(base, lora)
        return cls(model, merger=merger, **settings)

    @property
    def free_slots(self) -> int:
        """Sessions that may be added."""
        return len(self._free)

    @property
    def running(self) -> int:
        """Turns now being sampled."""
        return int(self._running.sum())

    def add(self, request: Request) -> None:
        """Starts a turn. Raises ValueError without a free slot, room in the context, or while the session still samples."""
        slot = self._slot_of.get(request.session_key)
        used = 0 if slot is None else int(self._total[slot])
        if slot is None and not self._free:
            raise ValueError(f"session {request.session_key}: all {len(self._running)} slots are taken; release one first")
        if slot is not None and self._running[slot]:
            raise ValueError(f"session {request.session_key}: its turn is still being sampled")
        if not request.tokens or request.max_new_tokens < 1 or used + len(request.tokens) >= self._max_tokens:
            raise ValueError(
                f"session {request.session_key}: cannot append {len(request.tokens)} tokens to {used} and sample "
                f"{request.max_new_tokens}; a context has {self._max_tokens} tokens"
            )
        slot = self._take(request) if slot is None else slot
        start = used + len(request.tokens)
        self.counts += Counts(prompt_tokens=start, reused_tokens=int(self._cached[slot]))
        self._tokens[slot, used:start] = request.tokens
        self._first[slot] = self._cached[slot]
        self._total[slot] = self._start[slot] = start
        self._limit[slot] = min(start + request.max_new_tokens, self._max_tokens)
        self._seed[slot] = request.seed & _MASK64
        self._temperature[slot] = request.temperature
        self._arrivals += 1
        self._arrival[slot] = self._arrivals
        self._running[slot] = True

    def _take(self, request: Request) -> int:
        slot = heapq.heappop(self._free)  # the lowest: running slots stay close together
        self._slot_of[request.session_key] = slot
        self._key_of[slot] = request.session_key
        self._cached[slot] = self._total[slot] = 0
        self._cache.clear(slot, self._held.keep(slot, request.tokens))
        return slot

    def release(self, session_key: str) -> None:
        """Frees a session's slot at once, also in the middle of a turn. Raises KeyError if it has none."""
        slot = self._slot_of.pop(session_key)
        del self._key_of[slot]
        self._running[slot] = False
        heapq.heappush(self._free, slot)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Samples one token for the running turns and returns those that finished; their slots stay taken."""
        slots = self._due()
        if not len(slots):
            return []
        logits = self._forward(slots)
        positions = self._total[slots]
        uniform = uniforms(self._seed[slots], positions)
        tokens, logprobs = sample(logits, self._temperature[slots], uniform)
        if not np.isfinite(logprobs).all():
            worst = self._key_of[int(slots[np.argmin(np.isfinite(logprobs))])]
            raise MilesError(f"weights of version {self.version} give logits that are not finite, first in session {worst}")
        self._tokens[slots, positions] = tokens
        self._logprobs[slots, positions] = logprobs
        self._version_of[slots, positions] = len(self._versions) - 1
        self._cached[slots] = positions
        self._held.read(slots, positions)
        self._total[slots] = positions + 1
        done = (tokens == self._end_id) | (positions + 1 >= self._limit[slots])
        return [self._finish(int(slot)) for slot in slots[done]]

    def _due(self) -> Ints:
        """Running slots that take part in this step, ascending: all that decode, and the oldest that read."""
        slots = np.flatnonzero(self._running)
        is_reading = self._total[slots] - self._cached[slots] > 1
        reading = slots[is_reading]
        if not len(reading):
            return slots
        chosen = self._choose(reading[np.argsort(self._arrival[reading])])
        return np.sort(np.concatenate([slots[~is_reading], np.array(chosen)]))

    def _choose(self, reading: Ints) -> list[int]:
        """Of slots in their order of arrival those that read now, up to the budget of a step; new ones get what others hold.

        One that would compute what another one computes in this very step waits for it, where that is half of its work.
        """
        chosen: list[int] = []
        left = PREFILL_TOKENS_PER_STEP
        for slot in reading.tolist():
            total, known, soon, source = int(self._total[slot]), int(self._cached[slot]), 0, slot
            if known == 0:
                source, known, soon = self._held.find(slot, self._total, chosen)
            if chosen and total - known > left:
                break
            if 2 * (soon - known) >= total - known:
                continue
            if source != slot:
                self._cache.copy(source, slot, known)
                self.counts += Counts(reused_tokens=known)
                if self._experts is not None:
                    self._experts.copy(source, slot, known)
            self._cached[slot] = known
            left -= total - known
            chosen.append(slot)
        return chosen

    def _forward(self, slots: Ints) -> torch.Tensor:
        """Reads what is not yet cached -> logits [B, vocabulary] behind each slot's newest token."""
        cached = self._cached[slots]
        pack = Pack(self._cache, slots, cached, self._total[slots] - cached)
        token_ids = torch.from_numpy(self._tokens[pack.slots, pack.positions]).to(self._device)
        positions = torch.from_numpy(pack.positions).to(self._device)
        hidden = self._model.base_model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            # Any 4-d mask keeps the model from making its own; the pack masks.
            attention_mask=self._no_mask,
            use_cache=False,
            pack=pack,
        ).last_hidden_state
        if self._experts is not None:
            self._experts.keep(pack.slots, pack.positions)
        return self._logits(hidden[0, torch.from_numpy(pack.last).to(self._device)])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n, vocabulary]. Two contiguous dimensions: a frozen head takes a slow path for anything else."""
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden.contiguous())
        return logits

    def _finish(self, slot: int) -> Finished:
        self._running[slot] = False
        return self._turn(slot)

    def so_far(self, session_key: str) -> Finished:
        """What the session's newest turn has sampled; `broken` where it had not ended."""
        return self._turn(self._slot_of[session_key])

    def _turn(self, slot: int) -> Finished:
        first, total = int(self._first[slot]), int(self._total[slot])
        span = slice(int(self._start[slot]), total)
        tokens = self._tokens[slot, span].astype(np.int32)
        is_cut = total >= self._limit[slot]
        return Finished(
            session_key=self._key_of[slot],
            tokens=tokens,
            logprobs=self._logprobs[slot, span].copy(),
            versions=tuple(self._versions[index] for index in self._version_of[slot, span]),
            reason="end" if len(tokens) and tokens[-1] == self._end_id else "length" if is_cut else "broken",
            # The newest token was not fed yet; before the first one is sampled nothing is sure to have been read.
            experts=None if self._experts is None else self._experts.of(slot, first, total - 1 if len(tokens) else first),
        )

    def close(self) -> None:
        """Lets go of model and cache."""
        del self._model, self._cache, self._merger, self._experts

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, torch.Tensor], version: Version) -> None:
        """Exchanges all weights, or raises ValueError with the names at fault and exchanges none.

        Names are those of the model's state_dict, the dtype is `weights_dtype`; of tied weights one name is enough. Or they are
        an adapter's (adapters.py), and the weights become what it makes of the base model's.
        """
        if self._merger is not None:
            for name, weight in self._merger.merged(tensors, self._device):
                self._model.get_parameter(name).copy_(weight)
        else:
            own, given = match_weights(self._model, tensors, self._weights_dtype)
            for name, parameter in own.items():
                parameter.copy_(given[name])
        self._held.forget()
        self.version = Version(*version)
        self._versions.append(self.version)

    @torch.inference_mode()
    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]:
        """[len - 1] each: log softmax(logits / temperature) of every next token, by a full forward pass without cache."""
        order = sorted(range(len(token_lists)), key=lambda index: len(token_lists[index]))
        results: dict[int, npt.NDArray[np.float32]] = {}
        for begin in range(0, len(order), LOGPROB_SEQUENCES):
            chunk = order[begin : begin + LOGPROB_SEQUENCES]
            for index, values in zip(chunk, self._full([token_lists[i] for i in chunk], temperature), strict=True):
                results[index] = values
        return [results[index] for index in range(len(token_lists))]

    def _full(self, token_lists: list[list[int]], temperature: float) -> list[npt.NDArray[np.float32]]:
        """One right-padded batch; causal attention keeps the padding out of sight."""
        lengths = [len(tokens) for tokens in token_lists]
        padded = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
        for row, tokens in enumerate(token_lists):
            padded[row, : len(tokens)] = tokens
        ids = torch.from_numpy(padded).to(self._device)
        hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return [
            self._next_logprobs(hidden[row, : length - 1], ids[row, 1:length], temperature)
            for row, length in enumerate(lengths)
        ]

    def _next_logprobs(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> npt.NDArray[np.float32]:
        """[n, h], [n] -> [n]; the head runs over few rows at a time, so that a large vocabulary fits into memory."""
        rows = max(1, LOGIT_ELEMENTS // self._model.config.vocab_size)
        parts = [
            token_logprobs(self._logits(some), chosen, temperature)
            for some, chosen in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        ]
        return torch.cat(parts).cpu().numpy()


def _check_model(config: Any, max_tokens: int) -> None:
    """Refuses what the slot attention does not compute. Raises RecipeError."""
    if config.model_type not in SUPPORTED:
        raise RecipeError(f"model: the torch engine runs {', '.join(SUPPORTED)}, not {config.model_type!r}")
    if getattr(config, "sliding_window", None) is not None:
        raise RecipeError(
            f"model: the torch engine runs full attention only, the config has a window of {config.sliding_window}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise RecipeError(f"model: the torch engine runs full attention only, the config has {', '.join(sorted(kinds))}")
    if max_tokens > config.max_position_embeddings:
        raise RecipeError(
            f"environment.max_tokens={max_tokens} is more than the model's max_position_embeddings="
            f"{config.max_position_embeddings}; lower it"
        )


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """[n, vocabulary], [n] -> [n] log softmax(logits / temperature) of the tokens, in float32."""
    return torch.log_softmax(logits.float() / temperature, dim=-1).gather(-1, tokens[:, None])[:, 0]


def sample(
    logits: torch.Tensor, temperature: npt.NDArray[np.float32], uniform: npt.NDArray[np.float64]
) -> tuple[Ints, npt.NDArray[np.float32]]:
    """Draws one token a row by inverting the cumulative distribution at `uniform`; temperature 0 takes the largest.

    logits [B, vocabulary], temperature and uniform [B] -> tokens [B], float32 logprobs [B].
    """
    greedy = torch.from_numpy(temperature == 0).to(logits.device)
    divisor = torch.from_numpy(np.where(temperature == 0, 1, temperature)).to(logits.device)
    logprobs = torch.log_softmax(logits.float() / divisor[:, None], dim=-1)
    tokens = logprobs.argmax(dim=-1)
    if not (temperature == 0).all():
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        target = torch.from_numpy(uniform).to(logits.device) * cumulative[:, -1]
        drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        tokens = torch.where(greedy, tokens, drawn.clamp(max=logits.shape[-1] - 1))
    return tokens.cpu().numpy(), logprobs.gather(-1, tokens[:, None])[:, 0].cpu().numpy()


def uniforms(seeds: npt.NDArray[np.uint64], positions: Ints) -> npt.NDArray[np.float64]:
    """[B] numbers in [0, 1), a hash (splitmix64) of seed and position with 48 bits."""
    mixed = _mix(_mix(seeds) + positions.astype(np.uint64))
    return (mixed >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def match_weights(
    model: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model's own tensors and the given ones, of `dtype`, under the same names, tied names folded into one.

    Raises ValueError.
    """
    own, first_name = _own_tensors(model)
    given: dict[str, torch.Tensor] = {}
    faults: list[str] = []
    for name, tensor in tensors.items():
        if name not in first_name:
            faults.append(f"unknown: {name}")
            continue
        first = first_name[name]
        target = own[first]
        if tensor.shape != target.shape or tensor.dtype != dtype:
            faults.append(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {tuple(target.shape)}")
        elif first in given and not torch.equal(given[first], tensor):
            faults.append(f"{name}: is tied to another name and differs from it")
        else:
            given[first] = tensor
    seen = {first_name[name] for name in tensors if name in first_name}
    faults += [f"missing: {name}" for name in own if name not in seen]
    if faults:
        raise ValueError(f"weights refused, nothing was changed ({len(faults)} faults): " + "; ".join(faults[:12]))
    return own, given


def _own_tensors(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a model, each under its first name, and the first name of every name: tied weights have several."""
    own: dict[str, torch.Tensor] = {}
    first_of: dict[int, str] = {}
    first_name: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first_name[name] = first_of.setdefault(id(tensor), name)
        own[first_name[name]] = tensor
    return own, first_name
