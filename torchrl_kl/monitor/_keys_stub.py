from __future__ import annotations

from dataclasses import dataclass, replace

from tensordict import NestedKey

from torchrl_kl._tensordict import LogProbKeys


@dataclass(frozen=True)
class KLKeys:
    log_prob: NestedKey | list[NestedKey] | None = None
    ref_log_prob: NestedKey | None = None
    kl: NestedKey | None = None
    kl_estimate: NestedKey | None = None
    episode_kl: NestedKey | None = None
    reward: NestedKey = "reward"
    task_reward: NestedKey | None = None
    kl_coeff: NestedKey | None = None
    done: NestedKey | None = None
    top_k: NestedKey | None = None

    def resolve(self, log_prob=None):
        lp = LogProbKeys(self.log_prob or log_prob or "action_log_prob")
        kl = self.kl or lp.beside("kl")
        est = self.kl_estimate or LogProbKeys(kl).beside("kl_estimate")
        return replace(self, log_prob=lp.key, kl=kl, kl_estimate=est)
