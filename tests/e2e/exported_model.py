"""A model folder in the hands of others: greedy answers by transformers and by vLLM, neither told more than where it lies.

.venv-vllm/bin/python tests/e2e/exported_model.py FOLDER QUESTION...      prints a JSON object: tokens of the answers
"""

from __future__ import annotations

import json
import os
import sys

# Before vLLM is imported: no compiler, no second process, no report to anybody.
os.environ |= {
    "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = 16
"""Of an answer, at most."""


def prompts(folder: str, questions: list[str]) -> list[list[int]]:
    """The questions by the folder's own tokenizer and template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def by_transformers(folder: str, asked: list[list[int]]) -> tuple[str, list[list[int]]]:
    """The dtype it took by itself, and the answers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    answers = []
    for tokens in asked:
        ids = torch.tensor([tokens])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
        answers.append(whole[0, len(tokens) :].tolist())
    return str(model.dtype), answers


def by_vllm(folder: str, asked: list[list[int]]) -> list[list[int]]:
    """In float32, which vLLM would round to 16 bits by itself."""
    from vllm import LLM, SamplingParams

    engine = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=16, gpu_memory_utilization=0.2)
    found = engine.generate(
        [{"prompt_token_ids": tokens} for tokens in asked], SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False
    )
    return [list(each.outputs[0].token_ids) for each in found]


def main() -> None:
    folder, *questions = sys.argv[1:]
    asked = prompts(folder, questions)
    dtype, answers = by_transformers(folder, asked)
    print(json.dumps({"dtype": dtype, "transformers": answers, "vllm": by_vllm(folder, asked)}))


if __name__ == "__main__":
    main()
