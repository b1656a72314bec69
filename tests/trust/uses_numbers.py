"""Wrong uses of estimators, sums, controllers, statistics and budgets."""

USES = r"""
kl_k1(tensor([1.0]), tensor([[1.0]]))
    ValueError: `log_prob` and `ref_log_prob` must have the same shape
kl_k1(tensor([1]), tensor([2]))
    TypeError: `log_prob` and `ref_log_prob` must be floating point
kl_k1([1.0], [2.0])
    TypeError: `log_prob` and `ref_log_prob` must be tensors
kl_k1(1.0, 2.0)
    TypeError: `log_prob` and `ref_log_prob` must be tensors
kl_k1(tensor([1.0]), tensor([1.0]), mask=tensor([1]))
    ValueError: `mask` must be boolean of the shape of `log_prob`, (1,)
kl_k1(tensor([1.0]), tensor([1.0]), mask=[True])
    TypeError: `mask` must be a tensor or None
kl_k1(tensor([1.0,2]), tensor([1.0,2]), mask=tensor([True]))
    ValueError: `mask` must be boolean of the shape of `log_prob`, (2,)
kl_k1(tensor([-1.0], dtype=torch.complex64), tensor([-1.0], dtype=torch.complex64))
    TypeError: `log_prob` and `ref_log_prob` must be floating point
kl_k2(tensor([1.0]), tensor([[1.0]]))
    ValueError: `log_prob` and `ref_log_prob` must have the same shape
kl_k3(tensor([1.0]), tensor([[1.0]]))
    ValueError: `log_prob` and `ref_log_prob` must have the same shape
kl_exact(tensor(0.5), tensor(0.5))
    ValueError: `policy` and `reference` must have their actions in the last dimension
kl_exact(tensor([[1, 2]]), tensor([[1, 2]]))
    TypeError: `policy` and `reference` must be floating point
kl_exact(tensor([[1.0, 2]]), tensor([[1.0, 2, 3]]))
    ValueError: `policy` and `reference` must have the same shape
kl_exact(tensor([[1.0, 2]]), torch.distributions.Categorical(logits=tensor([[1.0, 2]])))
    TypeError: `policy` and `reference` must both be tensors of logits or both
kl_exact(None, None)
    TypeError: `policy` and `reference` must both be tensors of logits or both
masked_sum(tensor([1, 2]), None)
    TypeError: `values` must be floating point
masked_sum([1.0], None)
    TypeError: `values` must be a tensor
masked_sum(tensor([1.0, 2]), tensor([1, 0]))
    ValueError: `mask` must be boolean of the shape of `values`, (2,)
masked_sum(tensor([1.0, 2]), tensor([True]))
    ValueError: `mask` must be boolean of the shape of `values`, (2,)
masked_mean(tensor([1.0, 2]), tensor([False, False]))
    ValueError: `mask` must be True somewhere in each mean
masked_mean(tensor([]), None)
    ValueError: `mask` must be True somewhere in each mean
masked_mean(tensor([[1.0, 2], [3, 4]]), tensor([[True, True], [False, False]]), dim=1)
    ValueError: `mask` must be True somewhere in each mean
masked_mean(tensor([1, 2]), None)
    TypeError: `values` must be floating point
sum_over_trajectories(tensor([1.0]), tensor([1]))
    ValueError: `done` must be boolean of the shape of `values`, (1,)
sum_over_trajectories(tensor(1.0), tensor(True))
    ValueError: `values` must have time as its last dimension
sum_over_trajectories(tensor([[1.0]]), tensor([[[True]]]))
    ValueError: `done` must be boolean of the shape of `values`, (1, 1)
sum_over_trajectories(tensor([1]), tensor([True]))
    TypeError: `values` must be floating point
sum_over_trajectories(tensor([1.0]), tensor([True]), mask=tensor([1.0]))
    ValueError: `mask` must be boolean of the shape of `values`, (1,)
ConstantKLController(-0.1)
    ValueError: `coeff` must be finite and at least 0
ConstantKLController(nan)
    ValueError: `coeff` must be finite and at least 0
ConstantKLController("0.1")
    TypeError: `coeff` must be a number
ConstantKLController(True)
    TypeError: `coeff` must be a number
ConstantKLController(tensor(0.1))
    TypeError: `coeff` must be a number
ConstantKLController(0.1, per="token")
    ValueError: `per` must be "trajectory" or "step"
ConstantKLController(None)
    TypeError: `coeff` must be a number
AdaptiveKLController(0.0, target=1.0, horizon=10)
    ValueError: `init_coeff` must be finite and above 0
AdaptiveKLController(0.1, target=0.0, horizon=10)
    ValueError: `target` must be finite and above 0
AdaptiveKLController(0.1, target=-1.0, horizon=10)
    ValueError: `target` must be finite and above 0
AdaptiveKLController(0.1, target=1.0, horizon=0)
    ValueError: `horizon` must be finite and above 0
AdaptiveKLController(0.1, target=1.0, horizon=10, clip=0)
    ValueError: `clip` must be finite and above 0
AdaptiveKLController(0.1, target=inf, horizon=10)
    ValueError: `target` must be finite and above 0
AdaptiveKLController(0.1, target=1.0, horizon=10, deadband=-1)
    ValueError: `deadband` must be finite and at least 0
AdaptiveKLController(0.1, target=1.0, horizon=10).update(3.0, 60)
    ValueError: `n_steps` must be less than horizon / clip = 50
AdaptiveKLController(0.1, target=1.0, horizon=10, per="episode")
    ValueError: `per` must be "trajectory" or "step"
ExponentialKLController(0.1, target=1.0, gain=0)
    ValueError: `gain` must be finite and above 0
ExponentialKLController(0.1, target=1.0, gain=-1)
    ValueError: `gain` must be finite and above 0
ExponentialKLController(0.1, target=1.0, gain=nan)
    ValueError: `gain` must be finite and above 0
ExponentialKLController(0.1, target=1.0, min_coeff=0)
    ValueError: `min_coeff` must be finite and above 0
ExponentialKLController(0.1, target=1.0, min_coeff=2, max_coeff=1)
    ValueError: `max_coeff` must be finite and at least 2
ExponentialKLController(100.0, target=1.0)
    ValueError: `init_coeff` must lie within [min_coeff, max_coeff] = [0.0001, 10]
ExponentialKLController(1e-5, target=1.0)
    ValueError: `init_coeff` must lie within [min_coeff, max_coeff] = [0.0001, 10]
PIDKLController(0.1, target=1.0, kp=-1)
    ValueError: `kp` must be finite and at least 0 and at most 100
PIDKLController(0.1, target=1.0, kp=101)
    ValueError: `kp` must be finite and at least 0 and at most 100
PIDKLController(0.1, target=1.0, ki=0)
    ValueError: `ki` must be finite and above 0 and at most 100
PIDKLController(0.1, target=1.0, kd=-1)
    ValueError: `kd` must be finite and at least 0 and at most 100
PIDKLController(0.1, target=1.0, smoothing=1.0)
    ValueError: `smoothing` must be finite and at least 0 and below 1
PIDKLController(0.1, target=1.0, smoothing=-0.1)
    ValueError: `smoothing` must be finite and at least 0 and below 1
PIDKLController(0.1, target="1.0")
    TypeError: `target` must be a number
controller().update(nan, 3)
    ValueError: `kl` must be finite
controller().update(tensor([1.0, 2.0]), 3)
    ValueError: `kl` must be one number
controller().update("1.0", 3)
    TypeError: `kl` must be a number
controller().update(None, 3)
    TypeError: `kl` must be a number
controller().update(1.0, 0)
    ValueError: `n_steps` must be at least 1
controller().update(1.0, 2.5)
    TypeError: `n_steps` must be an int
controller().update(1.0, tensor(3))
    TypeError: `n_steps` must be an int
controller().update(1.0, 3, standard_error=-1)
    ValueError: `standard_error` must be finite and at least 0, or NaN
controller().update(1.0, 3, standard_error=inf)
    ValueError: `standard_error` must be finite and at least 0, or NaN
controller().update(1+0j, 3)
    TypeError: `kl` must be a number
ExponentialKLController(0.1, target=0.5, deadband=1).update(1.0, 3)
    ValueError: `standard_error` must be known where deadband=1
controller().load_state_dict({})
    RuntimeError: Missing key(s) in state_dict: "coeff"
controller().load_state_dict({"coeff": tensor(nan, dtype=torch.float64)})
    RuntimeError: `coeff` must be one finite number
controller().load_state_dict({"coeff": tensor(-1.0, dtype=torch.float64)})
    RuntimeError: `coeff` must lie within [0.0001, 10]
controller().load_state_dict({"coeff": tensor(1e9, dtype=torch.float64)})
    RuntimeError: `coeff` must lie within [0.0001, 10]
controller().load_state_dict(PIDKLController(0.1, target=0.5).state_dict())
    RuntimeError: Unexpected key(s) in state_dict: "filtered_error", "filtered_change"
PIDKLController(0.1, target=0.5).load_state_dict(controller().state_dict())
    RuntimeError: Missing key(s) in state_dict: "filtered_error", "filtered_change"
ConstantKLController(0.1).load_state_dict({"coeff": tensor(inf)})
    RuntimeError: `coeff` must be one finite number
KLStatistics().add(1.0)
    TypeError: `values` must be a tensor
KLStatistics().add([1.0])
    TypeError: `values` must be a tensor
KLStatistics().add(tensor([nan]))
    ValueError: `values` must be finite
KLStatistics().add(tensor([inf]))
    ValueError: `values` must be finite
KLStatistics().add(tensor([1.0, 2.0]), mask=tensor([True]))
    ValueError: `mask` must be boolean of the shape of `values`, (2,)
KLStatistics().add(tensor([1.0]), mask=tensor([1]))
    ValueError: `mask` must be boolean of the shape of `values`, (1,)
KLStatistics().add(tensor([1e200], dtype=torch.float64))
    ValueError: `values` must be finite
KLStatistics().merge(1.0)
    TypeError: `other` must be a KLStatistics
KLStatistics().merge(None)
    TypeError: `other` must be a KLStatistics
KLStatistics().all_reduce()
    RuntimeError: `all_reduce` needs an initialized torch.distributed: call
KLStatistics().add(tensor([1+1j]))
    TypeError: `values` must be real numbers
coeff_for_budget([1.0, 2.0], 0.1)
    TypeError: `rewards` must be a tensor
coeff_for_budget(tensor([1.0, 2.0]), 0.0)
    ValueError: `budget` must be finite and above 0
coeff_for_budget(tensor([1.0, 2.0]), 5.0)
    ValueError: `budget` must be below 0.693147 nats, all that these samples can show
coeff_for_budget(tensor([1.0, 1.0]), 0.1)
    ValueError: `rewards` must differ between the samples of a prompt, which are one row
coeff_for_budget(tensor([nan, 1.0]), 0.1)
    ValueError: `rewards` and their differences must be finite
coeff_for_budget(tensor([]), 0.1)
    ValueError: `rewards` must be the rewards (N,) of samples, or (P, S) of S samples
coeff_for_budget(tensor([[[1.0]]]), 0.1)
    ValueError: `rewards` must be the rewards (N,) of samples, or (P, S) of S samples
coeff_for_budget(tensor(1.0), 0.1)
    ValueError: `rewards` must be the rewards (N,) of samples, or (P, S) of S samples
coeff_for_budget(tensor([[1.0], [2.0]]), 0.1)
    ValueError: `rewards` must differ between the samples of a prompt, which are one row
coeff_for_budget(tensor([1.0, 2.0]), "0.1")
    TypeError: `budget` must be a number
coeff_for_budget(tensor([1.0, 2.0]), tensor(0.1))
    TypeError: `budget` must be a number
coeff_for_budget(tensor([1.0, 2.0]), nan)
    ValueError: `budget` must be finite and above 0
coeff_for_budget(tensor([-inf, 2.0]), 0.1)
    ValueError: `rewards` and their differences must be finite
"""
