"""The transforms under the laws that all of them obey."""

from tests.laws.transform_laws import TransformLaws, WorkerLaws
from torchrl_kl import (
    AdaptiveKLController,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
    TopKActor,
)

STACK = frozenset({"ref_log_prob", "kl", "kl_estimate", "task_reward", "kl_coeff", "episode_kl"})


def adaptive(coeff: float) -> AdaptiveKLController:
    return AdaptiveKLController(coeff, target=0.1, horizon=100)


class TestReferenceModelLogProbTransform(TransformLaws):
    writes, in_env = frozenset({"ref_log_prob"}), frozenset({"not_drawn"})

    def make(self, seed=0):
        return ReferenceModelLogProbTransform(self.reference(seed))


class TestKLDivergenceTransform(TransformLaws):
    writes = frozenset({"kl", "kl_estimate"})

    def before(self):
        return [ReferenceModelLogProbTransform(self.reference())]

    def make(self, seed=0):
        return KLDivergenceTransform(estimator="k3")


class TestExactParts(TransformLaws):
    writes, drops = frozenset({"kl", "kl_estimate"}), frozenset({"_estimate"})

    def before(self):
        return [ReferenceModelLogProbTransform(self.reference(), estimator="exact")]

    def make(self, seed=0):
        return KLDivergenceTransform(estimator="exact")


class TestRewardAdjustmentTransform(TransformLaws):
    writes, penalizes = frozenset({"task_reward", "kl_coeff", "episode_kl"}), True

    def before(self):
        return [ReferenceModelLogProbTransform(self.reference()), KLDivergenceTransform()]

    def make(self, seed=0):
        return RewardAdjustmentTransform(adaptive(0.1 + seed)).freeze()


class TestAdaptiveStack(WorkerLaws):
    writes, in_env, penalizes = STACK, frozenset({"not_drawn"}), True
    drops = frozenset({"logits"})

    def make(self, seed=0):
        stack = KLConstrainedTransform(
            self.reference(seed), adaptive(0.1 + seed), estimator="exact"
        )
        return stack.freeze()


class TestTopKStack(TransformLaws):
    writes, in_env, penalizes = STACK, frozenset({"not_drawn"}), True
    drops = frozenset({"top_k"})

    def policy(self):
        return TopKActor(super().policy(), 2)

    def make(self, seed=0):
        return KLConstrainedTransform(self.reference(seed), 0.1 + seed, estimator="top_k")


class TestKLRewardTransform(TransformLaws):
    writes = frozenset({"kl_coeff", "reward_kl"})

    def make(self, seed=0):
        return KLRewardTransform(self.reference(seed), 0.1 + seed, out_keys=["reward_kl"])
