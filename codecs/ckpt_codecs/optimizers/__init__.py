"""Optimizer steps on arrays, without torch: given the gradients, the same bits as the trainer's own optimizer."""

from ckpt_codecs.optimizers.adagrad import Adagrad
from ckpt_codecs.optimizers.adam import Adam
from ckpt_codecs.optimizers.base import (
    MAX_COUNT,
    VECTOR,
    WEIGHTS,
    OptimizerStep,
    States,
    check_steps,
    whole_vectors,
)
from ckpt_codecs.optimizers.deepspeed_cpu_adam import DEEPSPEED_VECTOR, DeepSpeedCpuAdam
from ckpt_codecs.optimizers.lion import Lion
from ckpt_codecs.optimizers.sgd import Sgd

__all__ = [
    "DEEPSPEED_VECTOR",
    "MAX_COUNT",
    "VECTOR",
    "WEIGHTS",
    "Adagrad",
    "Adam",
    "DeepSpeedCpuAdam",
    "Lion",
    "OptimizerStep",
    "Sgd",
    "States",
    "check_steps",
    "whole_vectors",
]
