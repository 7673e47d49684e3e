"""The planning agent: what it does with a model, with goals and rewards, and with plans that went wrong."""

import dataclasses

import numpy as np
import pytest
import torch
from mazes import STACK, UMAZE, at_rest, codec, departures, learned, model_of, streams
from small import small

from diffusion_forcing import RNN, DiffusionForcing, NoiseSchedule, cosine
from diffusion_forcing.engine.config import replace
from diffusion_forcing.engine.run import open_run
from diffusion_forcing.engine.train import train
from diffusion_forcing.planning import agent as planning
from diffusion_forcing.planning.agent import PlanningAgent, PlanOptions, Trajectory, arrive, avoid, reach, visit
from diffusion_forcing.planning.data import frames_of, joints
from diffusion_forcing.planning.envs.maze2d import Balls

QUICK = PlanOptions(steps=2, scale=0.02, near_scale=0.02, replan=10, eta=0.0)
GOAL = torch.tensor(UMAZE.goal, dtype=torch.float32)[None]
both = pytest.mark.parametrize("kind", ["transformer", "rnn"])


def agent_of(kind="transformer", number=3, *, episode=60, seed=0, **options) -> PlanningAgent:
    """An agent of few steps at the start of short episodes."""
    agent = PlanningAgent(learned(kind), "umaze", dataclasses.replace(QUICK, **options), seed=seed)
    agent.reset(number, steps=episode)
    return agent


def goals(agent):
    return np.tile(UMAZE.goal, (agent.number, 1))


def drive(agent, steps, **wanted):
    """Actions (steps, n, 2) of an agent among balls that do as it says."""
    balls = Balls("umaze", agent.number, seed=1)
    actions = []
    for _ in range(steps):
        actions.append(agent.act(balls.observation, **(wanted or {"goal": balls.goal})))
        balls.step(actions[-1])
    return np.stack(actions)


def watched(agent):
    """What the agent plans from now on: (step, balls, tokens) of each plan, in a list that fills up."""
    seen, plan = [], agent._sample

    def spy(who, *arguments):
        seen.append((agent.time, who.tolist(), arguments[-1]))
        return plan(who, *arguments)

    agent._sample = spy
    return seen


# Actions.


@both
@pytest.mark.parametrize("number", [1, 4])
def test_actions_are_forces_for_each_ball(kind, number):
    actions = drive(agent_of(kind, number), 12)
    assert actions.shape == (12, number, 2)
    assert actions.dtype == np.float32
    assert np.isfinite(actions).all()
    assert np.abs(actions).max() <= 1
    assert (actions != 0).any()


@pytest.mark.parametrize("options", [{}, {"eta": 1.0}, {"draws": 2}])
def test_the_seed_decides(options):
    one, same, other = (drive(agent_of(seed=seed, **options), 3) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_a_reset_begins_anew():
    agent = agent_of()
    first = drive(agent, 11)
    agent.reset(3, steps=60)
    assert (agent.time, agent.counts.plans, agent.past.shape[1]) == (0, 0, 0)
    np.testing.assert_array_equal(drive(agent, 11), first)
    agent.reset(2, steps=60)
    assert drive(agent, 1).shape == (1, 2, 2)


def test_what_is_executed_is_what_was_planned():
    agent = agent_of(lookahead=2, replan=8)
    actions = drive(agent, 8)
    np.testing.assert_array_equal(actions.swapaxes(0, 1), np.clip(agent.plan[:, :8, :2], -1, 1))


@both
@pytest.mark.parametrize("schedule", ["full_sequence", "pyramid", "autoregressive"])
@pytest.mark.parametrize("form", ["eps", "step"])
def test_it_plans_along_each_schedule(kind, schedule, form):
    agent = agent_of(kind, episode=40, schedule=schedule, form=form)
    plan = agent.propose(at_rest((3, 1), (1, 3), (3, 3)), goals(agent))
    assert plan.action.shape == (3, 40, 2)
    assert plan.observation.shape == (3, 40, 4)
    assert all(torch.isfinite(part).all() for part in plan)


def test_a_flat_pyramid_is_a_full_sequence_and_a_steep_one_goes_token_by_token():
    def plan(**options):
        agent = agent_of(episode=40, **options)
        return agent.propose(at_rest((3, 1), (1, 3), (3, 3)), goals(agent)).observation

    torch.testing.assert_close(plan(schedule="pyramid", slope=0.0), plan(schedule="full_sequence"))
    torch.testing.assert_close(plan(schedule="pyramid", slope=2.0), plan(schedule="autoregressive"))
    assert not torch.equal(plan(schedule="pyramid"), plan(schedule="full_sequence"))


def test_watching_a_plan_leaves_it_as_it_is():
    rows = []
    for on_step in (None, lambda row, x, levels: rows.append((row, x.shape[1], int(levels.max())))):
        agent = agent_of("rnn", episode=40, scale=0, schedule="pyramid")
        agent.on_step = on_step
        plan = agent.propose(at_rest((3, 1), (1, 3), (3, 3)), goals(agent)).observation
        if on_step is None:
            unseen = plan
    torch.testing.assert_close(plan, unseen, atol=1e-4, rtol=1e-4)
    assert rows[-1] == (5, 1 + 4, 0), "4 tokens a row apart, each in two steps, after the present"


# How far and how often.


def test_it_plans_again_after_so_many_actions():
    agent = agent_of(lookahead=2, replan=7)
    plans = watched(agent)
    drive(agent, 22)
    assert plans == [(t, [0, 1, 2], 2) for t in (0, 7, 14, 21)]
    assert agent.counts.plans == 12
    assert [len(errors) for errors in agent.counts.errors] == [3, 3, 3]


def test_it_plans_again_at_the_end_of_a_plan_at_the_latest():
    agent = agent_of(lookahead=1, replan=25)
    plans = watched(agent)
    drive(agent, 21)
    assert [plan[0] for plan in plans] == [0, 10, 20]


def test_the_error_of_a_plan_is_the_distance_to_where_the_ball_then_is():
    agent = agent_of(number=1, lookahead=1, replan=4)
    agent.act(at_rest((3, 1)), UMAZE.goal[None])
    planned = agent.plan[0, 3, 2:4].copy()
    for _ in range(4):
        agent.act(at_rest((3, 1)), UMAZE.goal[None])
    assert agent.counts.errors[0] == pytest.approx(np.linalg.norm(planned - (3, 1)), rel=1e-5)


@pytest.mark.parametrize("episode", [40, 47])
@pytest.mark.parametrize("by_reward", [False, True])
def test_plans_end_with_the_episode(episode, by_reward):
    agent = agent_of(episode=episode, replan=6, near_replan=3)
    plans = watched(agent)
    drive(agent, episode + 5, **({"reward": reach(GOAL.repeat(3, 1))} if by_reward else {}))
    assert {plan[2] for plan in plans} == {1, 2, 3, 4}, "each a token shorter at times"
    assert all(t + STACK * tokens < max(episode, t + 1) + STACK for t, _, tokens in plans)
    assert plans[-1][0] > episode, "who acts on after the end is served, token by token"


def test_a_plan_that_arrives_makes_the_next_ones_short_and_frequent(monkeypatch):
    """Arriving in the third token asks for it, the tokens before it and a margin, rounded up to one of few lengths."""
    agent = agent_of(number=2, episode=300, surprise=10.0, doubt=10.0)
    lengths, frames_to_goal = [], 25

    def straight(who, seen, goal, reward, tokens):
        lengths.append((agent.time, who.tolist(), tokens))
        frames = np.zeros((len(who), tokens * STACK, 6), dtype=np.float32)
        frames[..., 2:4] = (3, 1)
        frames[who == 0, frames_to_goal:, 2:4] = UMAZE.goal
        return frames

    monkeypatch.setattr(agent, "_sample", straight)
    for t in range(32):
        frames_to_goal = 25 if t < 10 else 0
        agent.act(at_rest((3, 1), (3, 1)), goals(agent))
    own, other = ([(t, tokens) for t, who, tokens in lengths if ball in who] for ball in (0, 1))
    assert own == [(0, 4), (5, 6), (15, 6), (25, 4), (30, 4)], "the shortest plan is followed by the next after five actions"
    assert other[:5] == [(0, 4), (0, 8), (0, 16), (0, 30), (10, 29)], "a plan that does not arrive looks twice as far"


@pytest.mark.parametrize(("shortest", "longest"), [(4, 30), (4, 80), (1, 7), (4, 4), (9, 3), (1, 1)])
def test_lengths_of_plans_rise_from_the_shortest_to_the_whole_episode(shortest, longest):
    lengths = planning._lengths(shortest, longest)
    assert lengths[0] == min(shortest, longest)
    assert lengths[-1] == longest
    assert (np.diff(lengths) > 0).all()
    assert (lengths[1:] <= np.maximum(lengths[:-1] + 1, np.round(1.25 * lengths[:-1]))).all()


def test_guidance_grows_from_the_whole_episode_to_the_shortest_plan():
    agent = agent_of(episode=300, scale=0.1, near_scale=3.0)
    scales = [agent._scale(tokens) for tokens in range(1, 31)]
    assert scales[:4] == pytest.approx([3.0] * 4)
    assert scales[-1] == pytest.approx(0.1)
    assert (np.diff(scales[3:]) < 0).all()
    power = np.diff(np.log(scales[3:])) / np.diff(np.log(np.arange(4, 31)))
    np.testing.assert_allclose(power, power[0])
    assert agent_of(scale=0.0, near_scale=3.0)._scale(2) == 0, "no guidance is none at any length"
    assert agent_of(episode=300, lookahead=2, scale=0.1)._scale(2) == 0.1


def test_one_token_ahead_is_a_policy_with_the_same_weights():
    planner, policy = agent_of(episode=300, lookahead=30), agent_of(episode=300, lookahead=1)
    plans = watched(planner), watched(policy)
    drive(planner, 1)
    drive(policy, 1)
    assert [seen[0][2] for seen in plans] == [30, 1]
    assert (planner.plan.shape[1], policy.plan.shape[1]) == (300, 10)
    for one, other in zip(planner.model.parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(one, other)


# Memory.


def after_two_pasts(memory, kind="transformer"):
    """Plans of two balls that stand where the other stands, and came there on other ways."""
    plans = []
    for way in (0.0, 0.3):
        agent = agent_of(kind, number=1, lookahead=2, memory=memory)
        for t in range(11):
            agent.act(at_rest((3, 2 + way * (1 - t / 10))), UMAZE.goal[None])
        plans.append(agent.plan.copy())
    return plans


@both
@pytest.mark.parametrize("memory", [1, 3])
def test_with_memory_the_past_matters(kind, memory):
    one, other = after_two_pasts(memory, kind)
    assert np.abs(one - other).max() > 1e-3


@both
def test_without_memory_the_present_is_all(kind):
    one, other = after_two_pasts(0, kind)
    np.testing.assert_array_equal(one, other)


def test_what_is_remembered_are_the_last_tokens_and_what_came_before_them():
    agent = agent_of(memory=2, lookahead=2)
    balls, seen = Balls("umaze", 3, seed=1), []
    contexts, look = [], agent._context

    def spy(who, now):
        contexts.append(look(who, now))
        return contexts[-1]

    agent._context = spy
    for _ in range(31):
        seen.append(balls.observation)
        balls.step(agent.act(balls.observation, balls.goal))
    assert [context.shape[1] for context in contexts] == [1, 2, 3, 3], "the present alone, then up to two tokens after a first present"
    seen = torch.from_numpy(np.stack(seen, axis=1)).float()
    frames = codec().decode(contexts[-1])[..., 2:]
    for frame, step in ((9, 10), (19, 20), (29, 30)):  # the last frame of each token
        torch.testing.assert_close(frames[:, frame, :2], seen[:, step, :2], atol=0.2, rtol=0)
    present = codec().decode(contexts[0])[..., 2:]
    torch.testing.assert_close(present[:, -1, :2], seen[:, 0, :2], atol=0.1, rtol=0)


@pytest.mark.parametrize("acts", [10, 15])
def test_a_proposal_with_memory_starts_from_the_observation_it_is_given(acts):
    """After ten acts the past lacks a frame of a token (an error); later the observation is not looked at."""
    plans = []
    for place in ((3, 1), (1, 3)):
        agent = agent_of(memory=1, lookahead=2, scale=0)
        drive(agent, acts)
        plans.append(agent.propose(at_rest(place, place, place), goals(agent)).position)
    assert not torch.equal(*plans)


# What it wants.


def line(*points) -> Trajectory:
    """One plan through positions, at rest."""
    position = torch.tensor(points, dtype=torch.float32)[None]
    return Trajectory(torch.zeros_like(position), torch.cat([position, torch.zeros_like(position)], dim=-1))


def test_points_passed_are_not_visited_again():
    first, then = torch.tensor([[0.0, 3.0]]), torch.zeros(1, 2)
    path, both = line((0, 3), (0, 1), (4, 0)), visit([first, then])
    both.see(torch.tensor([[0.0, 2.0]]))
    assert both.passed.tolist() == [0]
    both.see(torch.tensor([[0.3, 2.8]]))
    assert both.passed.tolist() == [1]
    assert both(path).item() == pytest.approx(reach(then)(path).item())
    both.see(torch.tensor([[0.0, 0.1]]))
    assert both.passed.tolist() == [1], "the last point stays"
    both = visit([first, then])
    both.see(torch.tensor([[0.0, 3.0], [1.0, 1.0]]))
    assert both.passed.tolist() == [1, 0], "each ball for itself"
    twice = Trajectory(*(part.repeat(2, 1, 1) for part in path))
    assert both(twice).tolist() == pytest.approx([reach(then)(path).item(), visit([first, then])(path).item()])
    with pytest.raises(ValueError, match="at least one point"):
        visit([])


def test_an_agent_tells_where_the_balls_are():
    agent = agent_of(number=2)
    both = visit([torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, 1.0]])])
    agent.act(np.array([[1.0, 1.1, 0, 0], [3.0, 1.0, 0, 0]]), reward=both)
    assert both.passed.tolist() == [1, 0]


def test_an_agent_leaves_the_callers_model_alone():
    model = model_of("transformer").train()
    PlanningAgent(model, "umaze")
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_ball_that_is_held_up_looks_to_the_end_again_and_is_guided_half_as_much(monkeypatch):
    agent, seen, lengths = agent_of(number=2, episode=300, near_replan=10), at_rest((1, 1), (3, 1)), {}
    make = agent._make

    def making(who, *others):
        for ball in who.tolist():
            lengths.setdefault(ball, others[-1])
        return make(who, *others)

    monkeypatch.setattr(agent, "_make", making)
    plan = line((1, 1), (1, 2), (3, 3))
    path = Trajectory(*(part.repeat(2, 1, 1) for part in plan))
    before = agent._reward(np.arange(2), goals(agent), None)(path)
    agent.act(seen, goals(agent))
    for surprises in (1, 2):
        lengths.clear()
        agent.horizon[:] = 4  # as if the plans had arrived
        agent.plan[:, :, 2:4] = seen[:, None, :2] + np.array([[[0.0, 0.5]], [[0.0, 0.01]]])  # the first ball's is not what happens
        while agent.age[0] < agent.interval[0]:
            agent.act(seen, goals(agent))
        agent.act(seen, goals(agent))
        assert lengths[0] == 30 - (agent.time - 1) // 10, "to the episode's end"
        assert lengths[1] == 4
        assert agent.surprises.tolist() == [surprises, 0]
        after = agent._reward(np.arange(2), goals(agent), None)(path)
        torch.testing.assert_close(after, before * torch.tensor([0.5**surprises, 1.0]))
    agent.plan[:, :, 2:4] = seen[:, None, :2]  # now the plans come true
    agent.age[:] = agent.interval
    agent.act(seen, goals(agent))
    assert agent.surprises.tolist() == [1, 0], "one plan that comes true takes one surprise back"


def test_a_plan_in_doubt_is_made_again_looking_further(monkeypatch):
    agent = agent_of(number=2, episode=300, surprise=10.0)
    monkeypatch.setattr(agent, "_arrives", lambda frames, goal: (np.ones(len(frames), bool), np.full(len(frames), 5)))
    monkeypatch.setattr(agent, "_doubts", lambda who, seen, frames: np.where(who == 0, 1.0, 0.1))
    plans = watched(agent)
    agent.act(at_rest((1, 1), (3, 1)), goals(agent))
    agent.horizon[:], agent.age[:] = 8, agent.interval
    plans.clear()
    agent.act(at_rest((1, 1), (3, 1)), goals(agent))
    assert plans == [(1, [0, 1], 8), (1, [0], 16), (1, [0], 30)], "the ball in doubt looks on to the episode's end, the other does not"


def test_the_model_doubts_what_it_would_not_have_drawn():
    agent = agent_of(number=2, episode=300)
    seen = at_rest((1, 1), (3, 1))
    own = agent._make(np.arange(2), seen, goals(agent), None, 8)
    bent = own.copy()
    bent[1, 40:, 2:4] += 2 * np.sin(np.arange(40))[:, None]  # a ball that jumps about
    before, after = agent._doubts(np.arange(2), seen, own), agent._doubts(np.arange(2), seen, bent)
    assert after[1] > 4 * before[1]
    assert after[0] < 2 * before[0]


def test_plans_by_joints_are_one_motion_from_where_the_ball_is():
    frames, _ = frames_of(streams())
    seen = at_rest((1.0, 1.0), (3.0, 1.2))
    worst = {}
    for name, laws in (("with", joints(frames, codec())), ("without", None)):
        model = learned("transformer")
        model = DiffusionForcing(model.backbone, model.schedule, codec=model.codec, variance=model.variance, joints=laws)
        agent = PlanningAgent(model, "umaze", dataclasses.replace(QUICK, scale=0.02))
        agent.reset(2, steps=60)
        plan = agent.propose(seen, goals(agent))
        apart = departures(torch.cat([plan.action, plan.observation], dim=-1), torch.from_numpy(seen).float())
        worst[name] = max(part.abs().max().item() for part in apart)
    assert worst["with"] < 0.02 < 0.2 < worst["without"]


def test_rewards_by_hand():
    path, origin = line((0, 3), (0, 1), (4, 0)), torch.zeros(1, 2)
    assert reach(origin)(path).item() == pytest.approx(-8, abs=1e-3)
    assert arrive(origin, sharpness=100.0)(path).item() == pytest.approx(-3, abs=1e-2), "the nearest moment counts for each of three frames"
    assert arrive(origin)(path).item() > arrive(origin)(line((0, 3), (0, 2), (4, 0))).item()
    assert visit([torch.tensor([[0.0, 3.0]]), origin])(path).item() == pytest.approx(-(0 + 2 + 4), abs=0.03), "two frames, then one"
    assert visit([origin])(path).item() == pytest.approx(reach(origin)(path).item())
    assert avoid(origin, 2.0)(path).item() == pytest.approx(-3, abs=1e-3), "one frame, a metre deep"
    assert avoid(origin, 0.5)(path).item() == 0
    assert path.velocity.shape == path.position.shape == (1, 3, 2)


def test_rewards_take_several_plans_of_each_ball_beside_one_another():
    goal = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    plans = Trajectory(torch.zeros(6, 1, 2), torch.zeros(6, 1, 4))
    np.testing.assert_allclose(reach(goal)(plans), [-0.01] * 3 + [-4.0] * 3, atol=1e-3)


def test_rewards_are_smooth_at_the_goal():
    position = torch.zeros(1, 3, 4, requires_grad=True)
    total = sum(reward(Trajectory(position[..., :2], position)) for reward in (reach(GOAL * 0), arrive(GOAL * 0), avoid(GOAL * 0, 1.0)))
    total.sum().backward()
    assert torch.isfinite(position.grad).all()


def proposed(reward, kind="transformer", number=6, tokens=6, **options):
    """Plans from one place, the same noise for all options."""
    agent = agent_of(kind, number, **{"steps": 5, **options})
    plan = agent.propose(at_rest(*[(3, 2)] * number), reward=reward, horizon=tokens)
    assert agent.counts.bad == 0
    return plan


REWARDS = {
    "reach": reach(GOAL),
    "arrive": arrive(GOAL),
    "visit": visit([GOAL, torch.tensor([[1.0, 3.0]])]),
    "reach and avoid": lambda plan: reach(GOAL)(plan) + avoid(torch.tensor([[2.0, 3.0]]), 0.5)(plan),
    "of one's own": lambda plan: -0.1 * plan.velocity.square().sum((1, 2)) - plan.action.square().sum((1, 2)),
}


@both
@pytest.mark.parametrize("name", REWARDS)
def test_guidance_raises_the_reward(name, kind):
    reward = REWARDS[name]
    plain, little, more = (reward(proposed(reward, kind, scale=scale)).mean().item() for scale in (0.0, 0.005, 0.02))
    assert plain < little < more


@both
@pytest.mark.parametrize("futures", ["resample", "rollout"])
def test_guidance_by_several_futures_raises_the_reward_too(kind, futures):
    reward = REWARDS["reach"]
    options = {"schedule": "pyramid", "futures": futures, "steps": 3}
    plain, one, three = (
        reward(proposed(reward, kind, scale=scale, draws=draws, **options)).mean().item() for scale, draws in ((0, 1), (0.02, 1), (0.02, 3))
    )
    assert plain < one
    assert plain < three
    assert one != three


def test_avoid_keeps_away():
    centre, goal = torch.tensor([[2.0, 2.0]]), REWARDS["reach"]
    shy = avoid(centre, 1.0, strength=10.0)
    without, aware = (proposed(reward, scale=0.02) for reward in (goal, lambda plan: goal(plan) + shy(plan)))
    assert shy(aware).mean() > shy(without).mean()


def test_a_goal_is_the_reward_reach():
    agent, other = agent_of(lookahead=4), agent_of(lookahead=4)
    np.testing.assert_allclose(
        agent.act(at_rest((3, 1), (1, 3), (3, 3)), goals(agent)),
        other.act(at_rest((3, 1), (1, 3), (3, 3)), reward=reach(GOAL.repeat(3, 1))),
        atol=1e-6,
    )


def test_guidance_acts_on_its_levels_only():
    reward = REWARDS["reach"]
    plain, never, late, always = (
        proposed(reward, scale=scale, guided=guided).position
        for scale, guided in ((0, (0, 1)), (0.02, (0, 0)), (0.02, (0, 0.5)), (0.02, (0, 1)))
    )
    assert torch.equal(plain, never)
    assert 0 < (plain - late).norm() < (plain - always).norm()


def test_of_several_candidates_the_best_is_kept(monkeypatch):
    drawn = []
    draw = planning.sample
    monkeypatch.setattr(planning, "sample", lambda *arguments, **options: drawn.append(draw(*arguments, **options)) or drawn[-1])
    agent = agent_of(candidates=5, lookahead=3)
    wanted = torch.tensor([[1.0, 1.0], [1.0, 3.0], [3.0, 3.0]])
    plan = agent.propose(at_rest((3, 1), (3, 2), (3, 3)), wanted.numpy())
    frames = codec().decode(drawn[0][:, 1:])
    assert frames.shape == (15, 30, 6)
    scores = reach(wanted)(Trajectory(frames[..., :2], frames[..., 2:])).view(3, 5)
    best = frames.view(3, 5, 30, 6)[torch.arange(3), scores.argmax(1)]
    assert torch.equal(plan.position, best[..., 2:4])
    assert torch.equal(plan.action, best[..., :2])


def test_a_candidate_that_is_no_number_is_not_the_best(monkeypatch):
    draw = planning.sample

    def spoilt(*arguments, **options):
        x = draw(*arguments, **options)
        x[::2] = torch.nan
        return x

    monkeypatch.setattr(planning, "sample", spoilt)
    agent = agent_of(candidates=2)
    assert torch.isfinite(agent.propose(at_rest((3, 1), (3, 2), (3, 3)), goals(agent)).position).all()
    assert agent.counts.bad == 0


def test_by_a_reward_all_balls_plan_together():
    """It may speak of all of them: such as to keep apart."""
    asked = []

    def together(plan):
        asked.append(len(plan.action))
        return -(plan.position - plan.position.mean(0)).square().sum((1, 2))

    agent = agent_of(draws=2)
    agent.act(at_rest((3, 1), (1, 3), (3, 3)), reward=together)
    agent.age[1] = 10**9  # one is due
    agent.act(at_rest((3, 1), (1, 3), (3, 3)), reward=together)
    assert set(asked) == {6}
    assert agent.counts.plans == 6


def test_after_goals_a_reward_may_still_speak_of_all_balls():
    agent = agent_of(episode=300)
    agent.act(at_rest((3, 1), (1, 3), (3, 3)), goals(agent))
    agent.horizon[:] = (4, 30, 30)  # as after a plan of which the first ball's arrived
    agent.age[:] = 10**9
    agent.act(at_rest((3, 1), (1, 3), (3, 3)), reward=reach(GOAL.repeat(3, 1)))


# Mistakes.

HERE = at_rest((3, 1), (1, 3), (3, 3))


def wrong(index, value):
    observation = HERE.copy()
    observation[index] = value
    return observation


@pytest.mark.parametrize(
    ("observation", "goal", "message"),
    [
        (HERE[:, :3], GOAL.repeat(3, 1), r"observations should be \(3, 4\), position and velocity of each ball; got \(3, 3\)"),
        (HERE[0], GOAL.repeat(3, 1), r"should be \(3, 4\).* got \(4,\)"),
        (HERE[:2], GOAL.repeat(2, 1), r"should be \(3, 4\).* reset\(n\) says how many balls there are"),
        (wrong((1, 2), np.nan), GOAL.repeat(3, 1), "the observation of ball 1 holds NaN or infinite numbers"),
        (wrong((2, 0), np.inf), GOAL.repeat(3, 1), "the observation of ball 2 holds NaN or infinite"),
        (wrong((1, slice(2)), (2, 1)), GOAL.repeat(3, 1), r"the position of ball 1 at \(2, 1\) lies in a wall"),
        (wrong((0, slice(2)), (30, 1)), GOAL.repeat(3, 1), r"the position of ball 0 at \(30, 1\) lies in a wall or outside of the umaze"),
        (HERE, [(1, 1), (2, 2), (1, 1)], r"goal 1 at \(2, 2\) lies in a wall .* the nearest free cell is"),
        (HERE, [(1, 1), (1, 1), (-4, 1)], r"goal 2 at \(-4, 1\) lies in a wall or outside"),
        (HERE, [(1, 1), (1, np.nan), (1, 1)], "goal 1 holds NaN"),
        (HERE, GOAL, "there are 3 balls but 1 goals; give each its own"),
        (HERE, UMAZE.goal, r"goal should be \(n, 2\)"),
        (HERE, None, r"say what the agent is to do: act\(observation, goal\), or act\(observation, reward=function\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["act", "propose"])
def test_what_cannot_be_is_refused(call, observation, goal, message):
    agent = agent_of()
    with pytest.raises(ValueError, match=message):
        getattr(agent, call)(observation, goal)
    assert agent.time == 0


def test_a_refused_observation_leaves_the_episode_alone():
    agent, other = agent_of(memory=1), agent_of(memory=1)
    balls = Balls("umaze", 3, seed=1)
    for t in range(12):
        if t == 5:
            with pytest.raises(ValueError, match="NaN"):
                agent.act(wrong((1, 2), np.nan), balls.goal)
        action = agent.act(balls.observation, balls.goal)
        np.testing.assert_array_equal(action, other.act(balls.observation, balls.goal))
        balls.step(action)


def test_a_goal_and_a_reward_are_one_wish_too_many():
    with pytest.raises(ValueError, match="say what the agent is to do"):
        agent_of().act(HERE, GOAL.repeat(3, 1), reward=reach(GOAL))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda plan: plan.position.sum(), r"one score a sequence, shape \(3,\); got \(\)"),
        (lambda plan: plan.position.sum(1), r"shape \(3,\); got \(3, 2\)"),
        (lambda plan: 1.0, r"shape \(3,\); got float"),
        (lambda plan: plan.position.detach().sum((1, 2)), "the reward has no gradient"),
    ],
)
@pytest.mark.parametrize("draws", [1, 2])
def test_a_reward_that_cannot_guide_is_refused(reward, message, draws):
    with pytest.raises(ValueError, match=message.replace("(3,", f"({3 * draws},").replace(r"\(3", rf"\({3 * draws}")):
        agent_of(draws=draws).act(HERE, reward=reward)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: 0}, f"{name} counts from 1; got 0") for name in ("steps", "draws", "candidates", "replan", "near_replan", "shortest")),
        ({"lookahead": 0}, "a plan looks at least one token ahead; got lookahead=0"),
        ({"memory": -1}, "memory and margin count tokens from 0; got -1, 3"),
        ({"margin": -1}, "memory and margin count tokens from 0; got 0, -1"),
        ({"guided": (0.5, 0.2)}, "0 <= low <= high <= 1"),
        ({"guided": (-0.1, 1.0)}, "0 <= low <= high <= 1"),
        ({"guided": (0.0, 1.1)}, "0 <= low <= high <= 1"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PlanOptions(**options)


@pytest.mark.parametrize(
    "options", [{"schedule": "zigzag"}, {"near_scale": -1.0}, {"scale": float("nan")}, {"scale": 0.1, "near_scale": 0.0}]
)
def test_options_that_cannot_plan_are_refused_at_once(options):
    with pytest.raises(ValueError):
        PlanOptions(**options)


@pytest.mark.parametrize("number", [0, -1])
def test_there_is_a_ball_at_least(number):
    with pytest.raises(ValueError, match=f"at least one ball; got {number}"):
        agent_of().reset(number)


def test_an_episode_lasts_a_token_at_least():
    with pytest.raises(ValueError, match="an episode must last a token of 10 steps at least; got 9"):
        agent_of().reset(3, steps=9)
    agent = agent_of(episode=10)
    assert drive(agent, 10).shape == (10, 3, 2)


def test_more_denoising_steps_than_levels_are_as_many_as_there_are():
    assert drive(agent_of(steps=500, lookahead=1, scale=0), 1).shape == (1, 3, 2)


def test_a_model_needs_its_codec_and_the_agent_its_frames():
    bare = DiffusionForcing(RNN(24, hidden=8, levels=10), NoiseSchedule(cosine(10)))
    with pytest.raises(ValueError, match="needs a model with its codec: train one with `dforce train maze2d-medium`"):
        PlanningAgent(bare, "umaze")
    with pytest.raises(ValueError, match="the model's tokens hold 10 frames; the agent was told 5"):
        PlanningAgent(model_of(), "umaze", frame_stack=5)
    with pytest.raises(ValueError, match="there is no maze 'tiny'; choose from umaze, medium, large"):
        PlanningAgent(model_of(), "tiny")


# Plans that went wrong.


def spoilt(agent, times, who=None, value=np.nan):
    """From now on the first plans (each ball's, or some balls') hold numbers that cannot be."""
    calls, plan = [], agent._sample

    def sample(balls, *arguments):
        frames = plan(balls, *arguments)
        if len(calls) < times:
            frames[np.isin(balls, balls if who is None else who), 3, 2] = value
        calls.append(balls.tolist())
        return frames

    agent._sample = sample
    return calls


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6, -30.0])
@pytest.mark.parametrize("times", [1, 2])
def test_a_bad_plan_is_made_again(times, value):
    agent = agent_of(lookahead=2, scale=0)
    calls = spoilt(agent, times, [1], value)
    actions = drive(agent, 3)
    assert calls == [[0, 1, 2], *[[1]] * times], "only the ball whose plan was bad"
    assert (agent.counts.bad, agent.counts.given_up, agent.counts.plans) == (times, 0, 3)
    assert np.isfinite(actions).all()
    assert (actions[:, 1] != 0).any()


def test_a_ball_whose_plans_stay_bad_pushes_with_no_force_until_the_next_plan():
    agent = agent_of(lookahead=2, replan=4)
    spoilt(agent, 3, [1])
    actions = drive(agent, 5)
    assert np.isfinite(actions).all()
    assert (actions[:4, 1] == 0).all()
    assert (actions[:4, [0, 2]] != 0).any((0, 2)).all()
    assert (actions[4, 1] != 0).any(), "the next plan is sound"
    assert (agent.counts.bad, agent.counts.given_up) == (3, 1)
    assert all(np.isfinite(errors).all() for errors in agent.counts.errors)


@pytest.mark.parametrize("options", [{}, {"memory": 2}, {"candidates": 2}])
def test_a_model_that_says_nothing_but_nan_moves_nothing(options):
    model = model_of()
    with torch.no_grad():
        model.backbone.leave.weight.fill_(torch.nan)
    agent = PlanningAgent(model, "umaze", dataclasses.replace(QUICK, lookahead=2, replan=10, **options))
    agent.reset(3, steps=60)
    assert not drive(agent, 25).any()
    assert (agent.counts.bad, agent.counts.given_up, agent.counts.plans) == (27, 9, 9)


def test_by_a_reward_all_plans_are_made_again():
    agent = agent_of(lookahead=2)
    calls = spoilt(agent, 1, [1])
    agent.act(HERE, reward=reach(GOAL.repeat(3, 1)))
    assert calls == [[0, 1, 2]] * 2
    assert (agent.counts.bad, agent.counts.given_up) == (1, 0)


# Runs.


def run_of(folder, monkeypatch, **changes):
    """The folder and the experiment of a run in the maze, after one step."""
    monkeypatch.setenv("DFORCE_CACHE", str(folder))
    experiment = replace(small("maze2d-umaze"), task__transitions=20_000, train__steps=1, **changes)
    open_run(folder / "run", "maze2d-umaze", experiment, "dforce train maze2d-umaze")
    train(experiment, folder / "run", quiet=True)
    return experiment


def test_an_agent_comes_from_a_run_with_its_options(tmp_path, monkeypatch):
    experiment = run_of(tmp_path, monkeypatch, task__plan__steps=3, task__plan__lookahead=2)
    agent = PlanningAgent.from_pretrained(tmp_path / "run")
    assert agent.maze is UMAZE
    assert agent.options == experiment.task.plan
    other = PlanningAgent.from_pretrained(str(tmp_path / "run"), QUICK, seed=3)
    assert (other.options, other.seed) == (QUICK, 3)
    third = PlanningAgent(DiffusionForcing.from_pretrained(tmp_path / "run" / "model"), UMAZE, QUICK, seed=3)
    np.testing.assert_array_equal(drive(other, 3), drive(third, 3))


def test_a_run_of_another_task_is_refused(tmp_path):
    experiment = small()
    open_run(tmp_path / "run", "composition", experiment, "dforce train composition")
    train(replace(experiment, train__steps=1), tmp_path / "run", quiet=True)
    with pytest.raises(ValueError, match="was trained for Composition, not for planning; train `dforce train maze2d-medium`"):
        PlanningAgent.from_pretrained(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="is not a run"):
        PlanningAgent.from_pretrained(tmp_path / "nowhere")


def test_a_run_whose_tokens_hold_rewards_is_refused(tmp_path, monkeypatch):
    run_of(tmp_path, monkeypatch, task__reward=True)
    with pytest.raises(ValueError, match="reward"):
        PlanningAgent.from_pretrained(tmp_path / "run")
