"""A monitor of KL-controlled runs: it names faults and their causes."""

from torchrl_kl.monitor.monitor import CONDITIONS, ConditionCount, KLMessage, KLMonitor

__all__ = ["CONDITIONS", "ConditionCount", "KLMessage", "KLMonitor"]
