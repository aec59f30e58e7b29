"""Everything that a learner imports, for a process that learners are forked from (test_exact_resume.py)."""

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - compiles at import, when the first engine is made
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401

import miles_core.learner.engine_files
import miles_core.learner.ranked
import miles_core.learner.trainer
import miles_core.roles.learner  # noqa: F401
import tests.protocol.test_exact_resume  # noqa: F401

torch.set_num_threads(1)
