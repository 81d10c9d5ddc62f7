"""Steps of optimizers on arrays, without torch: the same bits as the trainer's own optimizer, given its gradients."""

from ckpt_codecs.stepping.adagrad import Adagrad
from ckpt_codecs.stepping.adam import Adam
from ckpt_codecs.stepping.base import VECTOR, WEIGHTS, OptimizerStep, States, whole_vectors
from ckpt_codecs.stepping.deepspeed_cpu_adam import DEEPSPEED_VECTOR, DeepSpeedCpuAdam
from ckpt_codecs.stepping.lion import Lion
from ckpt_codecs.stepping.sgd import Sgd

__all__ = [
    "DEEPSPEED_VECTOR",
    "VECTOR",
    "WEIGHTS",
    "Adagrad",
    "Adam",
    "DeepSpeedCpuAdam",
    "Lion",
    "OptimizerStep",
    "Sgd",
    "States",
    "whole_vectors",
]
