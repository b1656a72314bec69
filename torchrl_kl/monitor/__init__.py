"""A monitor of KL-controlled runs: it names faults and their causes."""

from torchrl_kl.monitor.messages import CONDITIONS, ConditionCount, KLMessage
from torchrl_kl.monitor.monitor import KLMonitor

__all__ = ["CONDITIONS", "ConditionCount", "KLMessage", "KLMonitor"]
