"""The estimators "exact" and "top_k" under the laws of transforms."""

from typing import Any

from tests.helpers import (
    make_actor,
)
from tests.laws.transform_laws import TransformLaws, WorkerLaws
from tests.transforms.estimated import (
    SCRATCH,
    K,
)
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
    TopKActor,
)


class DistributionLaws(TransformLaws):
    estimator: Any

    def before(self):
        return [ReferenceModelLogProbTransform(self.reference(), estimator=self.estimator)]


class TestExactLaws(DistributionLaws, WorkerLaws):
    estimator, writes, drops = (
        "exact",
        frozenset({"kl", "kl_estimate"}),
        frozenset({"logits", SCRATCH}),
    )

    def make(self, seed=0):
        return KLDivergenceTransform(estimator="exact", actor=make_actor())


class TestTopKLaws(DistributionLaws):
    estimator, writes, drops = (
        "top_k",
        frozenset({"kl", "kl_estimate"}),
        frozenset({"top_k", SCRATCH}),
    )

    def policy(self):
        return TopKActor(super().policy(), K)

    def make(self, seed=0):
        return KLDivergenceTransform(estimator="top_k")


class StackLaws(TransformLaws):
    writes = frozenset(
        {"ref_log_prob", "kl", "kl_estimate", "task_reward", "kl_coeff", "episode_kl"}
    )
    penalizes = True
    estimator: Any

    def make(self, seed=0):
        return KLConstrainedTransform(self.reference(seed), 0.1 + seed, estimator=self.estimator)


class TestExactStackLaws(StackLaws, WorkerLaws):
    estimator, drops = "exact", frozenset({"logits"})


class TestTopKStackLaws(StackLaws):
    estimator, drops = "top_k", frozenset({"top_k"})

    def policy(self):
        return TopKActor(super().policy(), K)
