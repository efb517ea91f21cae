"""The rivals that Syre's study measures it by, and the pieces of the study that compute something."""

import pytest
import torch
from torch import nn

from assay.optim.syre import study
from assay.optim.syre.problems import VAE, Contrastive, ContrastiveLoss, EvidenceLoss, TwoFactorLinear, linear_probe, mlp
from assay.optim.syre.rivals import ReDo, decay_towards, drop_connect, hidden_layers, hold_fixed, to_noise, to_the_start


def stack():
    torch.manual_seed(0)
    return mlp([4, 6, 5, 3], nn.ReLU)


def step(model, optimizer, x=None):
    optimizer.zero_grad()
    model(torch.randn(8, 4) if x is None else x).square().mean().backward()
    optimizer.step()


def test_l2_init_is_gradient_descent_on_the_distance_to_the_start():
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([p], 0.1)
    decay_towards(optimizer, to_the_start(optimizer), 0.5)
    with torch.no_grad():
        p.add_(1.0)
    p.grad = torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.tensor([1.95, 2.95]))


def test_noise_is_drawn_anew():
    target, p = to_noise(1.0), nn.Parameter(torch.zeros(1000, 25))
    assert not torch.equal(target(p), target(p))
    assert target(p).std().item() == pytest.approx(0.2, rel=0.05)


def test_w_fix_holds_its_share_of_each_matrix():
    model = mlp([40, 60, 50], nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
    hold_fixed(optimizer, 0.1, 1.0)
    before = model[0].weight.detach().clone()
    for _ in range(3):
        step(model, optimizer, torch.randn(8, 40))
    same = (model[0].weight == before).float().mean().item()
    assert same == pytest.approx(0.1, abs=0.02)


def test_dropconnect_drops_in_training_only():
    model = stack()
    x = torch.randn(8, 4)
    whole = model(x)
    drop_connect(model, 0.5)
    assert not torch.allclose(model(x), whole)
    model.eval()
    torch.testing.assert_close(model(x), whole)


def test_redo_revives_a_dead_unit_without_changing_the_function():
    model = stack()
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2] = 0.0, -1.0
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    ReDo(model, optimizer, every=1, tau=0.0)
    x = torch.randn(64, 4)
    before = model(x)
    step(model, optimizer, x)
    assert model[0].weight[2].any()
    assert model[0].bias[2] == 0
    assert not model[2].weight[:, 2].any()
    torch.testing.assert_close(model(x), before)


def test_hidden_layers_of_a_stack():
    assert [(a.out_features, c.in_features) for a, _, c in hidden_layers(stack())] == [(6, 6), (5, 5)]
    assert hidden_layers(TwoFactorLinear(3)) == []


def test_a_linear_probe_reads_separable_classes():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(3, (300,), generator=g)
    x = nn.functional.one_hot(y).float() + 0.1 * torch.randn(300, 3, generator=g)
    assert linear_probe((x[:200], y[:200]), (x[200:], y[200:])) == 1.0
    assert linear_probe((x[:200], y[:200]), (torch.zeros(100, 3), y[200:])) < 0.6


def test_contrastive_views_are_shifts_and_losses_fall_for_equal_views():
    loss = ContrastiveLoss(0.5, 0.0)
    x = torch.zeros(5, 64)
    x[:, 27] = 1.0
    assert loss.view(x).sum(1).tolist() == [1.0] * 5
    torch.manual_seed(0)
    images = torch.rand(16, 64)
    far = loss(lambda z: torch.randn(len(z), 8), (images,))
    near = loss(lambda z: torch.eye(16).repeat(2, 1), (images,))
    assert near < far
    assert Contrastive(64, 16, 8)(images).shape == (16, 8)


def test_the_evidence_loss_has_no_divergence_at_the_prior():
    net = VAE(64, 8, 2)
    for p in net.encoder.parameters():
        nn.init.zeros_(p)
    net.eval()
    x = torch.rand(5, 64)
    assert EvidenceLoss(3.0)(net, (x,)).item() == pytest.approx(nn.functional.mse_loss(net(x)[2], x).item())


def test_the_shift_alone_starts_where_syre_starts():
    config = study.study.scale("smoke")
    starts = []
    for arm in ("syre-1", "shift-only"):
        model = stack()
        torch.manual_seed(5)
        study.ARMS[arm](model, config)
        starts.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*starts, rtol=0, atol=0)
    assert not torch.equal(starts[0], torch.cat([p.detach().flatten() for p in stack().parameters()]))


def test_arms_are_run_where_they_are_said_to_be():
    from assay.bench import NotApplicable
    from assay.bench.log import Log

    config = study.study.scale("smoke")
    assert set(study.RUN_IN) <= set(study.ARMS)
    assert {case for cases in study.RUN_IN.values() for case in cases} <= set(study.CASES)
    log = Log(seed=0, replicate="vae/0", scale="smoke", device="cpu", arm="redo")
    with pytest.raises(NotApplicable, match=r"run on plasticity, digits-0\.001, digits-0\.02 alone"):
        study.trial(study.ARMS["redo"], None, config, log)


@pytest.mark.parametrize("name", ["plasticity/0", "fixed/0", "digits-0.02/0", "dead/0", "vae/0", "simclr/0", "1000"])
def test_every_case_is_prepared_trained_and_measured(name):
    from assay.bench.log import Log, seed_everything

    config = study.study.scale("smoke").model_copy(update={"tasks": 2, "task_steps": 3, "steps": 3})
    log = Log(seed=0, replicate=name, scale="smoke", device="cpu", arm="syre-1")
    seed_everything(0)
    case = study.prepare(config, log)
    found = study.trial(study.ARMS["syre-1"], case, config, log)
    assert found
    assert all(isinstance(value, float) for value in found.values())


def test_tasks_are_the_same_images_permuted():
    from assay.bench.log import Log

    case = study.prepare(study.study.scale("smoke"), Log(seed=0, replicate="plasticity/0", scale="smoke", device="cpu"))
    first, second = case.tasks[:2]
    assert not torch.equal(first.train[0], second.train[0])
    assert torch.equal(first.train[0].sort(1).values, second.train[0].sort(1).values)
    assert len({tuple(pair) for pair in torch.stack([first.train[1], second.train[1]], 1).tolist()}) == 10


def test_an_unknown_case_is_named():
    from assay.bench.log import Log

    with pytest.raises(ValueError, match=r"cases must be among plasticity, .* got 'mnist'"):
        study.prepare(study.study.scale("smoke"), Log(seed=0, replicate="mnist/0", scale="smoke", device="cpu"))
