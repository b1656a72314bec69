"""Wrong uses of collectors, losses, the monitor, language models and envs."""

USES = r"""
kl_collector(Collector, WalkEnv((2,)), ACTOR, 0.1, frames_per_batch=10, total_frames=10)
    TypeError: `stack` must be a KLConstrainedTransform
kl_collector("Collector", WalkEnv((2,)), ACTOR, stack(), frames_per_batch=10, total_frames=10)
    TypeError: `collector_class` must be one of Collector, MultiSyncCollector
kl_collector(Collector, "env", ACTOR, stack(), frames_per_batch=10, total_frames=10)
    ValueError: `create_env_fn` must be one callable or one per worker
kl_collector(Collector, env(stack()), ACTOR, stack(), frames_per_batch=10, total_frames=10).next()
    RuntimeError: the batch has 'kl_coeff': 'reward' was penalized for its KL before, and
KLPenaltyLoss(nn.Linear(2, 2), 0.1)
    TypeError: `actor` must be a probabilistic actor (with `get_dist` and `log_prob`)
KLPenaltyLoss(ACTOR, -0.1)
    ValueError: `coeff` must be finite and at least 0
KLPenaltyLoss(ACTOR, "x")
    TypeError: `controller` must be a KLController or a number
KLPenaltyLoss(ACTOR, 0.1, gradient="k1")
    ValueError: `gradient` must not be "k1": as a loss its expected gradient is zero
KLPenaltyLoss(ACTOR, 0.1, gradient="kl")
    ValueError: `gradient` must be one of ('step', 'sequence', 'k2', 'k3')
KLPenaltyLoss(ACTOR, 0.1, weights="kl")
    ValueError: `weights` must be one of (None, 'step', 'trajectory')
KLPenaltyLoss(ACTOR, 0.1, reduction="max")
    ValueError: `reduction` must be one of ('mean', 'sum', 'none')
KLPenaltyLoss(ACTOR, 0.1, reference="x")
    TypeError: `reference` must be an actor or a callable that returns a context
KLPenaltyLoss(ACTOR, 0.1)(stack()(batch()))
    RuntimeError: the batch has ('next', 'kl_coeff') other than 0: this loss would
KLPenaltyLoss(ACTOR, 0.1, gradient="sequence")(unnamed(batch()))
    ValueError: gradient='sequence' with weights='trajectory' needs whole trajectories
KLPenaltyLoss(ACTOR, 0.1, gradient="sequence")(without(batch(), "action_log_prob"))
    KeyError: 'action_log_prob' is not in the data
KLPenaltyLoss(ACTOR, 0.1, gradient="sequence")(without(batch(), "action"))
    KeyError: 'action' is not in the data
KLPenaltyLoss(ACTOR, 0.1, gradient="k2")(without(batch(), "action"))
    KeyError: 'action' is not in the data
KLPenaltyLoss(ACTOR, 0.1, gradient="sequence")(without(batch(), ("next", "done")))
    KeyError: ('next', 'done') is not in the data
KLPenaltyLoss(ACTOR, 0.1, gradient="sequence", time_dim=0)(unnamed(batch()))
    ValueError: `time_dim` must be the last batch dimension
KLPenaltyLoss(ACTOR, controller()).update_controller(unnamed(batch()))
    ValueError: a controller that counts nats per trajectory needs whole trajectories
KLPenaltyLoss(ACTOR, controller()).update_controller(without(batch(), ("next", "done")))
    KeyError: ('next', 'done') is not in the data
KLPenaltyLoss(ACTOR, 0.1, loss=nn.Linear(2, 2))
    TypeError: `loss` must be a LossModule or None
KLPenaltyLoss(ACTOR, 0.1, loss=nn.Linear(2, 2))(batch())
    TypeError: `loss` must be a LossModule or None
KLPenaltyLoss(ACTOR, 0.1, loss=KLPenaltyLoss(ACTOR, 0.1))(batch())
    ValueError: `loss` writes ['kl', 'kl_coeff', 'loss_kl'] too, which KLPenaltyLoss
KLPenaltyLoss(ACTOR, 0.1)(with_(batch(), ("collector", "mask"), torch.ones(3, 5)))
    TypeError: the mask ('collector', 'mask') must be boolean
KLPenaltyLoss(ACTOR, 0.1)(with_(batch(), ("collector", "mask"), torch.ones(3, 5).long()))
    TypeError: the mask ('collector', 'mask') must be boolean
KLPenaltyLoss(ACTOR, 0.1)(with_(batch(), ("collector", "mask"), torch.ones(3, 5, 2).bool()))
    ValueError: a flag must have the first dimensions of
KLPenaltyLoss(ACTOR, 0.1, time_dim=1.5)(unnamed(batch()))
    ValueError: `time_dim` must be the last batch dimension
KLMonitor(0.1)
    TypeError: `controller` must be a KLController
KLMonitor(stack())
    TypeError: `controller` must be a KLController
KLMonitor(controller(), actor=nn.Linear(2, 2))
    TypeError: `actor` must be a probabilistic actor (with `get_dist` and `log_prob`)
KLMonitor(controller(), reference=ACTOR)
    TypeError: `reference` must be a FrozenActor
KLMonitor(controller(), reference=FrozenActor(ACTOR))
    ValueError: `reference` needs `actor`: the exact KL is that of both
KLMonitor(controller(), window=0)
    ValueError: `window` must be an int of at least 1
KLMonitor(controller(), window=2.5)
    ValueError: `window` must be an int of at least 1
KLMonitor(controller(), check_every=0)
    ValueError: `check_every` must be an int of at least 1
KLMonitor(controller(), tolerance=0)
    ValueError: `tolerance` must be finite and above 0
KLMonitor(controller(), tolerance=nan)
    ValueError: `tolerance` must be finite and above 0
KLMonitor(controller())(batch())
    KeyError: 'kl' is not in the data
KLMonitor(controller())(without(batch(), "next"))
    KeyError: 'next' is not in the data
KLMonitor(controller())(unnamed(stack()(batch())))
    RuntimeError: the target is in nats per trajectory
KLMonitor(controller()).load_state_dict({})
    KeyError: `state_dict` lacks ['coeffs', 'conditions', 'evidence', 'k1_sums'
KLMonitor(controller()).load_state_dict({"n_batches": 1})
    KeyError: `state_dict` lacks ['coeffs', 'conditions', 'evidence', 'k1_sums'
KLMonitor(controller(), actor=ACTOR)(without(stack()(batch()), "action"))
    KeyError: 'action' is not in the data
KLMonitor(controller(), actor=ACTOR)(without(stack()(batch()), "action_log_prob"))
    KeyError: 'action_log_prob' is not in the data
GPT(0, 8)
    ValueError: `vocab_size` must be at least 1
GPT(11, 0)
    ValueError: `block_size` must be at least 1
GPT(11, 8, n_embd=50)
    ValueError: `n_embd` must be a multiple of `n_head`
GPT(11, 8, dropout=1.0)
    ValueError: `dropout` must lie in [0, 1)
GPT(11, 8, n_layer=2.0)
    TypeError: `n_layer` must be an int
GPT(11.0, 8)
    TypeError: `vocab_size` must be an int
MODEL(torch.ones(1, 10).long())
    ValueError: `tokens` must have a last dimension of 1 to `block_size` = 9
MODEL(torch.ones(1, 3))
    TypeError: `tokens` must be int64 or int32
MODEL(tensor([[11]]))
    ValueError: `tokens` must lie in 0..10
MODEL(tensor([[-1]]))
    ValueError: `tokens` must lie in 0..10
MODEL(tensor(3))
    ValueError: `tokens` must have a last dimension of 1 to `block_size` = 9
MODEL(torch.ones(1, 0).long())
    ValueError: `tokens` must have a last dimension of 1 to `block_size` = 9
MODEL([[1, 2]])
    TypeError: `tokens` must be a tensor
CausalLMActor(None)
    TypeError: `model` must be a torch.nn.Module
CausalLMActor(MODEL, temperature=0)
    ValueError: `temperature` must be finite and above 0
CausalLMActor(MODEL, temperature=-1)
    ValueError: `temperature` must be finite and above 0
CausalLMActor(MODEL, temperature=nan)
    ValueError: `temperature` must be finite and above 0
CausalLMActor(MODEL, temperature="1")
    TypeError: `temperature` must be a number
CausalLMActor(MODEL, temperature=True)
    TypeError: `temperature` must be a number
CausalLMActor(MODEL, cache_bytes=-1)
    ValueError: `cache_bytes` must be at least 0
CausalLMActor(MODEL, cache_bytes="1")
    TypeError: `cache_bytes` must be an int or None
CausalLMActor(GPT(11, 8, n_out=1))(DigitLanguageEnv(batch_size=(2,)).reset())
    ValueError: `model` must have one output per token (from 2 to vocab_size = 11)
CausalLMCritic(GPT(11, 8))
    ValueError: `model` must have one output per position
CausalLMCritic(GPT(11, 9))(DigitLanguageEnv(batch_size=(2,)).reset())
    ValueError: `model` must have one output per position
text_actor()(TensorDict(tokens=torch.ones(2, 5), position=torch.ones(2).long(), batch_size=2))
    TypeError: `tokens` must be int64 or int32
text_actor()(TensorDict(tokens=torch.ones(2, 5).long(), position=torch.ones(2), batch_size=2))
    TypeError: `position` must be int64 or int32
text_actor()(TensorDict(tokens=torch.full((2, 5), 12), position=torch.full((2,), 3), batch_size=2))
    ValueError: `tokens` must lie in 0..10
sample_responses(ACTOR, tensor([[1, 2]]), 2, pad_token=0)
    TypeError: `actor` must be a CausalLMActor
sample_responses(text_actor(), [[1, 2]], 2, pad_token=0)
    TypeError: `prompts` must be tensors
sample_responses(text_actor(), tensor([[1.0, 2]]), 2, pad_token=0)
    TypeError: `prompts` must be int64 or int32
sample_responses(text_actor(), tensor([1, 2]), 2, pad_token=0)
    ValueError: `prompts` must be ids (N, P), or a list of 1-dimensional tensors, each
sample_responses(text_actor(), [], 2, pad_token=0)
    ValueError: `prompts` must be ids (N, P), or a list of 1-dimensional tensors, each
sample_responses(text_actor(), torch.ones(0, 3).long(), 2, pad_token=0)
    ValueError: `prompts` must be ids (N, P), or a list of 1-dimensional tensors, each
sample_responses(text_actor(), torch.ones(2, 0).long(), 2, pad_token=0)
    ValueError: `prompts` must be ids (N, P), or a list of 1-dimensional tensors, each
sample_responses(text_actor(), [tensor([1]), tensor([], dtype=torch.long)], 2, pad_token=0)
    ValueError: `prompts` must be ids (N, P), or a list of 1-dimensional tensors, each
sample_responses(text_actor(), tensor([[1, 2]]), 0, pad_token=0)
    ValueError: `max_new_tokens` must be an int of at least 1
sample_responses(text_actor(), tensor([[1, 2]]), 2.0, pad_token=0)
    ValueError: `max_new_tokens` must be an int of at least 1
sample_responses(text_actor(), tensor([[1, 2]]), True, pad_token=0)
    ValueError: `max_new_tokens` must be an int of at least 1
sample_responses(text_actor(), tensor([[1, 2]]), 20, pad_token=0)
    ValueError: prompts and `max_new_tokens` must leave at most 9 tokens to be read
sample_responses(text_actor(), tensor([[1, 2]]), 2, pad_token=11)
    ValueError: `pad_token` must lie in the model's vocabulary of 11 tokens
sample_responses(text_actor(), tensor([[1, 2]]), 2, pad_token=-1)
    ValueError: `pad_token` must lie in the model's vocabulary of 11 tokens
sample_responses(text_actor(), tensor([[1, 2]]), 2, pad_token=0.5)
    TypeError: `pad_token` must be an int
sample_responses(text_actor(), tensor([[1, 2]]), 2, pad_token=0, eos_token=11)
    ValueError: `eos_token` must lie in the model's vocabulary of 11 tokens
sample_responses(text_actor(), tensor([[1, 2]]), 2, pad_token="a")
    TypeError: `pad_token` must be an int
sample_responses(text_actor(), tensor([[1, 12]]), 2, pad_token=0)
    ValueError: `tokens` must lie in 0..10
sample_responses(text_actor(), tensor([[1, 2]]), 2, pad_token=0, reward_fn=lambda t: 1.0)
    ValueError: `reward_fn` must return a tensor (1,)
sample_responses(text_actor(), tensor([[1, 2]]), 2, pad_token=0, reward_fn=lambda t: t)
    ValueError: `reward_fn` must return a tensor (1,)
sample_responses(text_actor(), tensor([[1, 2]]), 2, pad_token=0, chunk_size=0)
    ValueError: `chunk_size` must be an int of at least 1
as_steps(batch(), pad_token=0)
    KeyError: the batch must have ('tokens', 'full') and ('tokens', 'prompt'), or
as_steps(TensorDict(tokens=TensorDict(full=tensor([[1, 2]])), batch_size=1), pad_token=0)
    KeyError: the batch must have ('tokens', 'full') and ('tokens', 'prompt'), or
as_steps(with_(dialog(), ("tokens", "prompt"), tensor([[7, 6]])), pad_token=0)
    ValueError: ('tokens', 'full') must begin with ('tokens', 'prompt'), but that of
as_steps(with_(dialog(), ("next", "reward"), torch.ones(1, 4)), pad_token=0)
    ValueError: ('next', 'reward') must be one number per response, of shape (1, 1) or
as_steps(with_(dialog(), ("tokens", "full"), tensor([[5.0, 6, 7, 8]])), pad_token=0)
    TypeError: `('tokens', 'full')` must be int64 or int32
as_steps(with_(dialog(), ("tokens", "prompt"), tensor([[5, 6, 7, 8, 9]])), pad_token=0)
    ValueError: ('tokens', 'full') must begin with ('tokens', 'prompt'), but that of
ResponseKLTransform(ACTOR, 0.1)
    TypeError: `model` must be a language model that maps token ids to logits
ResponseKLTransform(None, 0.1)
    TypeError: `model` must be a torch.nn.Module
ResponseKLTransform(MODEL, "x")
    TypeError: `controller` must be a KLController or a number
ResponseKLTransform(MODEL, 0.1, temperature=0)
    ValueError: `temperature` must be finite and above 0
ResponseKLTransform(MODEL, 0.1, top_k=0)
    ValueError: `top_k` must be an int of at least 1
ResponseKLTransform(MODEL, 0.1, chunk_size=0)
    ValueError: `chunk_size` must be an int of at least 1
ResponseKLTransform(MODEL, 0.1, update_every=0)
    ValueError: `update_every` must be None or an int of at least 1
ResponseKLTransform(MODEL, 0.1, estimator="k7")
    ValueError: `estimator` must be one of ['k1', 'k2', 'k3', 'exact', 'top_k']
ResponseKLTransform(MODEL, 0.1)(without(dialog(), ("next", "reward")))
    KeyError: 'reward' is not in the data
ResponseKLTransform(MODEL, 0.1)(without(dialog(), "next"))
    KeyError: the batch has no "next"
ResponseKLTransform(MODEL, 0.1)(with_(dialog(), ("next", "reward"), torch.ones(1, 4)))
    ValueError: ('next', 'reward') must be one number per response, of shape (1, 1) or
ResponseKLTransform(MODEL, 0.1)(with_(dialog(), ("next", "reward"), torch.ones(1, 1).long()))
    TypeError: 'reward' must be floating point
ResponseKLTransform(MODEL, 0.1)(with_(dialog(), ("tokens", "full"), tensor([[5, 6, 70, 8]])))
    ValueError: ('tokens', 'full') must be ids of the model's vocabulary, 0 to 10, got 5 to 70
pickle.dumps(ResponseKLTransform(MODEL, 0.1))
    PicklingError: a ResponseKLTransform cannot be sent to another process, where it would
env(ResponseKLTransform(MODEL, 0.1))
    RuntimeError: ResponseKLTransform works on whole batches, not in an env: pass it as
stack()(dialog())
    KeyError: 'action_log_prob' is not in the data
DigitLanguage(vocab_size=0)
    ValueError: `vocab_size` must be at least 1
DigitLanguage(prompt_length=0)
    ValueError: `prompt_length` must be at least 1
DigitLanguage(window=0)
    ValueError: `window` must be at least 1
DigitLanguage(response_length=1.5)
    TypeError: `response_length` must be an int
DigitLanguageEnv(batch_size=(0,)).rollout(2)
    ValueError: `batch_size` must have dimensions of at least 1
DigitLanguageEnv("x")
    TypeError: `language` must be a DigitLanguage or None
DigitLanguageEnv(reward_fn=3)
    TypeError: `reward_fn` must be callable
DigitLanguageEnv(reward_fn=lambda t: t).rollout(4)
    ValueError: `reward_fn` must return one reward per text, shape (1,) for (1, 9)
KLMonitor(controller(), keys="kl")
    TypeError: `keys` must be KLKeys
"""
