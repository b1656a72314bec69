"""Wrong uses of the transforms, of their data, and of references."""

USES = r"""
stack("0.1")
    TypeError: `controller` must be a KLController or a number
stack(True)
    TypeError: `controller` must be a KLController or a number
stack(None)
    TypeError: `controller` must be a KLController or a number
stack(tensor(0.1))
    TypeError: `controller` must be a KLController or a number
stack(-1)
    ValueError: `coeff` must be finite and at least 0
stack(nan)
    ValueError: `coeff` must be finite and at least 0
stack(ConstantKLController)
    TypeError: `controller` must be a KLController or a number
stack(estimator="k4")
    ValueError: `estimator` must be one of ['k1', 'k2', 'k3', 'exact', 'top_k']
stack(estimator=None)
    ValueError: `estimator` must be one of ['k1', 'k2', 'k3', 'exact', 'top_k']
stack(estimator="top_k")(batch())
    KeyError: ('top_k', 'actions') is not in the data
stack(estimator="exact")(without(batch(), "logits"))
    KeyError: 'logits' is not in the data
stack(update_every=0)
    ValueError: `update_every` must be None or an int of at least 1
stack(update_every=1.5)
    ValueError: `update_every` must be None or an int of at least 1
stack(update_every=True)
    ValueError: `update_every` must be None or an int of at least 1
stack(update_every=-3)
    ValueError: `update_every` must be None or an int of at least 1
stack(sum_agents=1)
    TypeError: `sum_agents` must be True or False
stack(sum_agents=None)
    TypeError: `sum_agents` must be True or False
stack(chunk_size=0)
    ValueError: `chunk_size` must be at least 1, or None for a recurrent actor
stack(chunk_size=-1)
    ValueError: `chunk_size` must be at least 1, or None for a recurrent actor
stack(chunk_size=1.5)
    TypeError: `chunk_size` must be an int or None
stack(chunk_size=1.5)(batch())
    TypeError: `chunk_size` must be an int or None
stack(chunk_size=True)(batch())
    TypeError: `chunk_size` must be an int or None
stack(chunk_size="2")
    TypeError: `chunk_size` must be an int or None
stack(time_dim=0)(batch())
    ValueError: `time_dim` must be the last batch dimension
stack(time_dim=5)(batch())
    ValueError: `time_dim` must be the last batch dimension
stack(time_dim=-2)(batch())
    ValueError: `time_dim` must be the last batch dimension
stack(time_dim="time")(batch())
    ValueError: `time_dim` must be the last batch dimension
stack(keys=KLKeys(reward="nothing"))(batch())
    KeyError: 'nothing' is not in the data
env(stack(keys=KLKeys(reward="nothing"))).reset()
    KeyError: 'nothing' is not in the reward spec
stack(keys=KLKeys(log_prob="nothing"))(batch())
    KeyError: 'nothing' is not in the data
stack(keys=KLKeys(done="nothing"))(batch())
    KeyError: there is no 'nothing' and no 'done' in the step
stack(controller(), keys=KLKeys(done="nothing"))(batch())
    KeyError: there is no 'nothing' and no 'done' in the step
stack(keys=KLKeys(kl="reward"))(batch())
    ValueError: `keys` must name different entries
stack(keys=KLKeys(kl="kl", episode_kl="kl"))(batch())
    ValueError: `keys` must name different entries
stack(keys=KLKeys(task_reward="reward"))(batch())
    ValueError: `keys` must name different entries
stack(keys=KLKeys(kl_coeff="kl"))(batch())
    ValueError: `keys` must name different entries
stack(keys=KLKeys(ref_log_prob="kl"))(batch())
    ValueError: `keys` must name different entries
env(stack(keys=KLKeys(kl="kl", episode_kl="kl"))).reset()
    ValueError: `keys` must name different entries
env(stack(keys=KLKeys(kl="observation"))).reset()
    RuntimeError: KLConstrainedTransform would overwrite ['observation'], which the env
stack(reference=ACTOR.module[0])
    TypeError: `actor` must be a probabilistic actor (with `get_dist` and `log_prob`)
stack(reference="ref")
    TypeError: `reference` must be an actor or a callable that returns a context
stack(reference=lambda: 3)(batch())
    TypeError: `reference` must return a context manager when called
stack(reference=3)
    TypeError: `reference` must be an actor or a callable that returns a context
stack(reference=nullcontext())
    TypeError: `reference` must be an actor or a callable that returns a context
KLConstrainedTransform(nn.Linear(3, 4), 0.1)
    TypeError: `actor` must be a probabilistic actor (with `get_dist` and `log_prob`)
KLConstrainedTransform(None, 0.1)
    TypeError: `actor` must be a probabilistic actor (with `get_dist` and `log_prob`)
KLConstrainedTransform("actor", 0.1)
    TypeError: `actor` must be a probabilistic actor (with `get_dist` and `log_prob`)
KLConstrainedTransform(make_actor, 0.1)
    TypeError: `actor` must be a probabilistic actor (with `get_dist` and `log_prob`)
stack()(without(batch(), "next"))
    KeyError: the batch has no "next"
stack()(without(batch(), "action_log_prob"))
    KeyError: 'action_log_prob' is not in the data
stack()(without(batch(), "action"))
    KeyError: 'action' is not in the data
stack()(without(batch(), ("next", "reward")))
    KeyError: 'reward' is not in the data
stack()(without(batch(), ("next", "done"), ("next", "terminated"), ("next", "truncated")))
    KeyError: there is no 'done' and no 'done' in the step
stack(controller())(unnamed(batch()))
    RuntimeError: the controller is fed nats per trajectory, and in a batch of shape (3
stack(controller())(batch().reshape(-1))
    RuntimeError: the controller is fed nats per trajectory, and in a batch of shape
stack(controller())(batch()[:, 0])
    RuntimeError: the controller is fed nats per trajectory, and in a batch of shape (3,)
stack()(stack()(batch()))
    RuntimeError: the batch has 'kl_coeff': 'reward' was penalized for its KL before, and
stack()({"next": {}})
    TypeError: the batch must be a TensorDict
stack()(None)
    TypeError: the batch must be a TensorDict
stack()(batch().to_dict())
    TypeError: the batch must be a TensorDict
stack()(torch.ones(3))
    TypeError: the batch must be a TensorDict
stack()(with_(batch(), ("next", "reward"), torch.ones(3, 5)))
    ValueError: the KL and 'reward' must have the same shape
stack()(with_(batch(), ("next", "reward"), torch.ones(3, 5, 2)))
    ValueError: the KL and 'reward' must have the same shape
stack()(with_(batch(), ("next", "reward"), torch.ones(3, 5, 1).long()))
    TypeError: 'reward' must be floating point
stack()(with_(batch(), ("next", "reward"), torch.ones(3, 5, 1).bool()))
    TypeError: 'reward' must be floating point
stack()(with_(batch(), "action_log_prob", torch.ones(3, 5).long()))
    TypeError: `log_prob` and `ref_log_prob` must be floating point
stack()(with_(batch(), ("collector", "mask"), torch.ones(3, 5)))
    ValueError: `mask` must be boolean of the shape of `log_prob`, (3, 5)
stack()(with_(batch(), ("collector", "mask"), torch.ones(3, 5).long()))
    ValueError: `mask` must be boolean of the shape of `log_prob`, (3, 5)
stack(controller())(with_(batch(), ("collector", "mask"), torch.ones(3, 5, 2).bool()))
    ValueError: a flag must have the first dimensions of
stack(controller())(with_(batch(), ("collector", "traj_ids"), torch.zeros(3, 5, 2).long()))
    ValueError: `traj_ids` must have one number per step of a batch of shape (3, 5)
stack(controller())(with_(batch(), ("next", "done"), torch.zeros(3, 5, 1)))
    ValueError: the steps of the batch do not follow one another: 'observation' is not
stack(controller())(with_(batch(), ("next", "done"), torch.zeros(3, 5, 1).long()))
    ValueError: the steps of the batch do not follow one another: 'observation' is not
stack(controller())(with_(batch(), ("next", "done"), torch.zeros(3, 5).bool()))
    ValueError: the steps of the batch do not follow one another: 'observation' is not
stack(controller())(with_(batch(), ("next", "done"), torch.zeros(3, 5, 3).bool()))
    ValueError: a flag must have the first dimensions of
stack(controller())(with_(batch(), "is_init", torch.zeros(3, 5, 2).bool()))
    ValueError: `is_init` must have one number per step of a batch of shape (3, 5)
stack()(with_(batch(), "action_log_prob", torch.full((3, 5), nan)))
    ValueError: got invalid numbers: 'action_log_prob' has 15 of 15
stack(controller())(with_(batch(), "action_log_prob", torch.full((3, 5), nan)))
    ValueError: got invalid numbers: 'action_log_prob' has 15 of 15
stack(controller())(with_(batch(), "action_log_prob", torch.full((3, 5), inf)))
    ValueError: got invalid numbers: 'action_log_prob' has 15 of 15
stack()(with_(batch(), "action_log_prob", torch.full((3, 5), inf)))
    ValueError: got invalid numbers: 'action_log_prob' has 15 of 15
stack()(with_(batch(), "observation", torch.full((3, 5, 3), nan)))
    ValueError: got invalid numbers: 'observation' has 45 of 45
stack(controller())(with_(batch(), "observation", torch.full((3, 5, 3), nan)))
    ValueError: got invalid numbers: 'observation' has 45 of 45
stack(reference=make_actor(agents=True))
    ValueError: `reference` must have the actions of the policy
ReferenceModelLogProbTransform(None)
    TypeError: `actor` must be a probabilistic actor (with `get_dist` and `log_prob`)
ReferenceModelLogProbTransform(ACTOR)(without(batch(), "next"))
    KeyError: the batch has no "next"
KLDivergenceTransform()(batch())
    KeyError: 'ref_log_prob' is not in the data
KLDivergenceTransform(estimator="k9")
    ValueError: `estimator` must be one of ['k1', 'k2', 'k3', 'exact', 'top_k']
KLDivergenceTransform(estimator="exact")
    ValueError: `estimator="exact"` needs `actor`
RewardAdjustmentTransform(0.1)(batch())
    KeyError: 'kl' is not in the data
RewardAdjustmentTransform("x")
    TypeError: `controller` must be a KLController or a number
RewardAdjustmentTransform(None)
    TypeError: `controller` must be a KLController or a number
Compose(KLDivergenceTransform(), ReferenceModelLogProbTransform(ACTOR))(batch())
    KeyError: 'ref_log_prob' is not in the data
env(KLDivergenceTransform()).reset()
    KeyError: 'ref_log_prob' is not in the observation spec
env(RewardAdjustmentTransform(0.1)).reset()
    KeyError: 'kl' is not in the observation spec
env(KLDivergenceTransform(), ReferenceModelLogProbTransform(ACTOR)).reset()
    KeyError: 'ref_log_prob' is not in the observation spec
env(stack(), stack()).reset()
    RuntimeError: the env has 'kl_coeff': 'reward' was penalized for its KL before, and a
env(stack(), KLRewardTransform(ACTOR)).reset()
    RuntimeError: the env has 'kl_coeff': 'reward' was penalized for its KL before, and a
env(stack(), stack(keys=KLKeys.named("second", reward="task_reward"))).rollout(3)
    KeyError: 'task_reward' is not in the reward spec
env(stack(), FrameSkipTransform(2)).reset()
    RuntimeError: FrameSkipTransform comes after KLConstrainedTransform and steps the env
env(stack(), RewardScaling(0.0, 2.0)).reset()
    RuntimeError: RewardScaling comes after KLConstrainedTransform and rewrites 'reward'
env(stack(), RewardClipping(-1, 1)).reset()
    RuntimeError: RewardClipping comes after KLConstrainedTransform and rewrites
env(stack(), SignTransform(in_keys=["reward"])).reset()
    RuntimeError: SignTransform comes after KLConstrainedTransform and rewrites 'reward'
env(stack(), BinarizeReward()).reset()
    RuntimeError: BinarizeReward comes after KLConstrainedTransform and rewrites
env(stack(), ExcludeTransform("episode_kl")).rollout(5, ACTOR)
    KeyError: 'episode_kl' is not in the data
env(stack(controller(), update_every=1), ExcludeTransform("episode_kl")).rollout(5, ACTOR)
    KeyError: 'episode_kl' is not in the data
env(stack(), UnsqueezeTransform(-1, in_keys=["reward"])).reset()
    RuntimeError: UnsqueezeTransform comes after KLConstrainedTransform and rewrites
env(stack()).rollout(3, make_actor(return_log_prob=False))
    KeyError: the policy ran (its ['logits'] are there) but left no 'action_log_prob'
env(stack(), n_agents=2).reset()
    KeyError: 'reward' is not in the reward spec
KLConstrainedTransform(LSTM, 0.1)(batch())
    KeyError: 'is_init' is not in the data
KLRewardTransform(ACTOR, coef=-1)
    ValueError: `coef` must be finite and at least 0
KLRewardTransform(ACTOR, coef=nan)
    ValueError: `coef` must be finite and at least 0
KLRewardTransform(ACTOR, coef=tensor([0.1, 0.2]))
    ValueError: `coef` must be one number
KLRewardTransform(ACTOR, coef=True)(batch())
    TypeError: `coef` must be a number
KLRewardTransform(ACTOR, coef="0.1")
    TypeError: `coef` must be a number
KLRewardTransform(ACTOR, coef=controller())
    TypeError: `coef` must be a number
KLRewardTransform(ACTOR, in_keys=["reward", "r2"])
    ValueError: `in_keys` must be one key
KLRewardTransform(ACTOR, in_keys=["nothing"])(batch())
    KeyError: 'nothing' is not in the data
KLRewardTransform(ACTOR, out_keys=["a", "b"])
    ValueError: `out_keys` must be one key
KLRewardTransform(ACTOR, out_keys=[])(batch())
    ValueError: `out_keys` must be one key
KLRewardTransform(ACTOR, requires_grad=True, reference=FrozenActor(ACTOR))
    ValueError: `requires_grad` needs a reference that is a copy made here
FrozenActor(ACTOR, chunk_size=0)
    ValueError: `chunk_size` must be at least 1, or None for a recurrent actor
FrozenActor(LSTM, chunk_size=2)
    ValueError: `chunk_size` must be at least 1, or None for a recurrent actor
FrozenActor(nn.Linear(2, 2))
    TypeError: `actor` must be a probabilistic actor (with `get_dist` and `log_prob`)
FrozenActor(ACTOR).update_reference(ACTOR, tau=0)
    ValueError: `tau` must be in (0, 1]
FrozenActor(ACTOR).update_reference(ACTOR, tau=1.5)
    ValueError: `tau` must be in (0, 1]
FrozenActor(ACTOR).update_reference(ACTOR, tau=True)
    ValueError: `tau` must be in (0, 1]
FrozenActor(ACTOR).update_reference(ACTOR, tau=nan)
    ValueError: `tau` must be in (0, 1]
FrozenActor(ACTOR).update_reference(ACTOR, tau=tensor(0.5))
    ValueError: `tau` must be in (0, 1]
FrozenActor(ACTOR).update_reference(NORMAL)
    ValueError: `source` must have the weights of the reference, but lacks
FrozenActor(ACTOR).update_reference(None)
    TypeError: `source` must be a module
FrozenActor(ACTOR).update_reference(ACTOR.state_dict())
    TypeError: `source` must be a module
FrozenActor(ACTOR).update_reference(nn.Sequential(ACTOR))
    ValueError: `source` must have the weights of the reference, but lacks
FrozenActor(LSTM).trajectories(batch()).log_prob.shape
    KeyError: 'is_init' is not in the data
FrozenActor(LSTM).step(FrozenActor(LSTM).inputs(batch())).log_prob.shape
    UnknownStateError: the reference is recurrent and its state ['ref_h', 'ref_c'] is not in
stack(reference=FrozenActor(ACTOR), chunk_size=2)
    ValueError: `chunk_size` must be given to the FrozenActor that is the reference
stack(reference=FrozenActor(ACTOR), keys=KLKeys(log_prob="x"))
    ValueError: `KLKeys.log_prob` must be that of the FrozenActor, 'action_log_prob'
stack().load_state_dict(KLConstrainedTransform(NORMAL, 0.1).state_dict())
    RuntimeError: has a reference that does not fit its fingerprint
TopKActor(ACTOR, 0)
    ValueError: `k` must be an int of at least 1
TopKActor(ACTOR, 5)(batch())
    ValueError: `k` must be at most the number of actions, 4
TopKActor(ACTOR, 2.0)
    ValueError: `k` must be an int of at least 1
TopKActor(ACTOR, True)
    ValueError: `k` must be an int of at least 1
TopKActor(NORMAL, 2)(normal_batch())
    TypeError: the top k need a Categorical, OneHotCategorical or MaskedCategorical
TopKActor(nn.Linear(2, 2), 2)
    TypeError: `actor` must be a ProbabilisticTensorDictSequential
TopKActor(make_actor(return_log_prob=False), 2)
    ValueError: `actor` must record its log-prob
KLControlHook(0.1)
    TypeError: `stack` must be a KLConstrainedTransform
KLControlHook(KLRewardTransform(ACTOR))
    TypeError: `stack` must be a KLConstrainedTransform
stack(keys="second")
    TypeError: `keys` must be KLKeys
stack(keys={"kl": "k"})
    TypeError: `keys` must be KLKeys
env(stack(), SelectTransform("observation", "left", "kl")).rollout(5, ACTOR)
    KeyError: 'episode_kl' is not in the data
env(stack(), RenameTransform(["episode_kl"], ["sum"])).rollout(5, ACTOR)
    KeyError: 'episode_kl' is not in the data
"""
