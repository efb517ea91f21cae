"""FeatRecon's long tails, sampler, post-hoc head, and its training in several processes."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch.utils.data import DataLoader, TensorDataset

from assay.perception import FeatReconHead, LongTailSampler, make_long_tailed

# ---- long tails --------------------------------------------------------------------------------------------------------


def test_a_long_tail_has_the_counts_of_the_formula_and_follows_its_seed():
    y = torch.arange(10).repeat(500)[torch.randperm(5000, generator=torch.Generator().manual_seed(0))]
    kept = make_long_tailed(y, 100, seed=1)
    expected = [round(500 * 100 ** (-k / 9)) for k in range(10)]
    assert torch.bincount(y[kept]).tolist() == expected
    assert torch.equal(kept, kept.unique())
    assert torch.equal(kept, make_long_tailed(y.tolist(), 100, seed=1))
    assert not torch.equal(kept, make_long_tailed(y, 100, seed=2))
    assert torch.bincount(y[make_long_tailed(y, 1)]).tolist() == [500] * 10


def test_a_long_tail_of_uneven_classes_takes_what_they_have():
    y = np.array(["a"] * 1000 + ["b"] * 20 + ["c"] * 50)
    kept = y[make_long_tailed(y, 25).numpy()]
    assert [int((kept == k).sum()) for k in "abc"] == [100, 20, 4]


@pytest.mark.parametrize(
    ("targets", "factor", "message"),
    [
        ([0, 1, 0, 1], 0.5, "imbalance_factor must lie in"),
        ([0, 1, 0, 1], float("nan"), "imbalance_factor must lie in"),
        ([0, 0], 2, "at least two classes"),
        ([], 2, "at least one label"),
        ([0, 1, 0, 1], 100, "leaves class 1 without a row"),
    ],
)
def test_what_a_long_tail_refuses(targets, factor, message):
    with pytest.raises(ValueError, match=message):
        make_long_tailed(targets, factor)


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_classes_come_as_often_as_they_should_exactly(balance):
    counts = torch.tensor([400, 100, 25, 0, 4])
    y = torch.repeat_interleave(counts)
    drawn = torch.tensor(list(LongTailSampler(y, balance, num_samples=2000)))
    share = torch.where(counts > 0, counts.double() ** (1 - balance), 0.0)
    share = 2000 * share / share.sum()
    assert ((torch.bincount(y[drawn], minlength=5) - share).abs() < 1).all()
    for k in (0, 1, 2, 4):  # within a class every row comes equally often, up to one
        times = torch.bincount(drawn, minlength=len(y))[y == k]
        assert times.max() - times.min() <= 1


def test_epochs_differ_and_repeat():
    y = torch.repeat_interleave(torch.tensor([50, 10, 2]))
    sampler = LongTailSampler(y, seed=3)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(LongTailSampler(y, seed=4)) != first
    assert len(sampler) == len(first) == 62


def test_processes_share_an_epoch_without_overlap():
    y = torch.repeat_interleave(torch.tensor([50, 10, 3]))
    whole = list(LongTailSampler(y, num_samples=61))
    parts = [list(LongTailSampler(y, num_samples=61, num_replicas=3, rank=r)) for r in range(3)]
    assert [len(p) for p in parts] == [20] * 3
    assert sorted(itertools.chain(*parts)) == sorted(whole[:60])


def test_a_data_loader_takes_the_sampler():
    y = torch.repeat_interleave(torch.tensor([60, 20, 4]))
    loader = DataLoader(TensorDataset(y), batch_size=21, sampler=LongTailSampler(y))
    seen = torch.cat([batch for (batch,) in loader])
    assert torch.bincount(seen).tolist() == [28, 28, 28]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0.5, 1.0], {}, "class indices"),
        ([-1, 0], {}, "class indices"),
        ([], {}, "class indices"),
        ([0, 1], {"balance": 1.5}, "balance must lie in"),
        ([0, 1], {"num_replicas": 2, "rank": 2}, "rank must lie in"),
        ([0, 1], {"num_samples": 1, "num_replicas": 2}, "at least num_replicas"),
    ],
)
def test_what_the_sampler_refuses(labels, options, message):
    with pytest.raises(ValueError, match=message):
        LongTailSampler(labels, **options)


# ---- the post-hoc head -------------------------------------------------------------------------------------------------


@parametrize_with_checks([FeatReconHead()])
def test_head_conformance(estimator, check):
    check(estimator)


def test_the_head_helps_rare_classes_beyond_plain_logistic_regression():
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score

    X, y = load_digits(return_X_y=True)
    test = np.arange(len(y)) % 3 == 0
    pool, gains = np.flatnonzero(~test), []
    for seed in range(3):
        rows = pool[make_long_tailed(y[pool], 50, seed=seed).numpy()]
        head = FeatReconHead(random_state=seed).fit(X[rows], y[rows])
        z = head._unit(X[rows]).numpy()
        plain = LogisticRegression(max_iter=1000).fit(z, y[rows])
        scores = [
            balanced_accuracy_score(y[test], p) for p in (head.predict(X[test]), plain.predict(head._unit(X[test]).numpy()))
        ]
        gains.append(scores[0] - scores[1])
    assert min(gains) > 0.05, gains


def test_the_head_repeats_itself_and_keeps_labels():
    X, y = load_digits(return_X_y=True)
    rows = make_long_tailed(y, 50).numpy()
    names = np.array([f"digit {k}" for k in range(10)])[y]
    heads = [FeatReconHead(random_state=seed).fit(X[rows], names[rows]) for seed in (0, 0, 1)]
    scores = [head.decision_function(X[:50]) for head in heads]
    np.testing.assert_array_equal(scores[0], scores[1])
    assert np.abs(scores[0] - scores[2]).max() > 1e-6
    assert set(heads[0].predict(X[:50])) <= set(names)
    np.testing.assert_allclose(heads[0].predict_proba(X[:50]).sum(1), 1)
    states = [FeatReconHead(random_state=np.random.RandomState(s)).fit(X[rows], names[rows]) for s in (3, 3)]
    np.testing.assert_array_equal(*(head.decision_function(X[:50]) for head in states))
    shifted = FeatReconHead(random_state=0).fit(X[rows] * 1e6 + 3e6, names[rows])
    np.testing.assert_allclose(shifted.decision_function(X[:50] * 1e6 + 3e6), scores[0], atol=1e-3)


def test_the_head_is_searched_over_in_a_pipeline():
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    X, y = load_digits(return_X_y=True)
    rows = make_long_tailed(y, 10).numpy()
    grid = {"featreconhead__shrinkage": [0.0, 20.0]}
    search = GridSearchCV(make_pipeline(StandardScaler(), FeatReconHead()), grid, cv=3, error_score="raise")
    assert search.fit(X[rows], y[rows]).score(X, y) > 0.85


def test_a_class_of_one_row_is_filled_up_with_the_heads_spread():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(101, 6)) * 0.3 + np.eye(6)[[0] * 50 + [1] * 50 + [2]] * 3
    head = FeatReconHead(center=False).fit(X, [0] * 50 + [1] * 50 + [2])
    rec = head.reconstructor_
    assert rec.mean_angle[2] == pytest.approx(rec.mean_angle[:2].mean().item(), rel=1e-5)
    new = generator.normal(size=(200, 6)) * 0.3 + np.eye(6)[2] * 3
    assert (head.predict(new) == 2).mean() > 0.95


def test_what_the_head_refuses():
    X, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 6
    with pytest.raises(ValueError, match="at least two classes, got one class"):
        FeatReconHead().fit(X, np.zeros(30))
    with pytest.raises(ValueError, match="needs feature_dim ≥ 5, got 4"):
        FeatReconHead(eta=0.5).fit(X, y)
    with pytest.raises(ValueError, match="alpha must lie in"):
        FeatReconHead(alpha=1).fit(X, y)
    for center in (True, False):
        with pytest.raises(ValueError, match="no direction in any row"):
            FeatReconHead(center=center).fit(np.zeros((30, 4)), y)
    with pytest.raises(ValueError, match="NaN"):
        FeatReconHead().fit(np.where(X > 2, np.nan, X), y)


# ---- several processes -------------------------------------------------------------------------------------------------

WORKER = '''
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from assay.perception import BalancedSupConLoss, FeatReconLoss, FeatureReconstructor

dist.init_process_group("gloo")
rank = dist.get_rank()
counts = [24, 12, 4]
y = torch.repeat_interleave(torch.tensor(counts))
x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) + torch.eye(6)[y]
order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
x, y = x[order], y[order]
parts = {"even": [20, 20], "uneven": [27, 13]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = self.body(x)
        return self.head(h), F.normalize(h, dim=1)


def trained(net, x, y, gather, steps=6):
    """Losses of each step; a generator of its own, so that the draws of one process and of two agree."""
    rec = FeatureReconstructor(3, 5, counts)
    criterion = FeatReconLoss(rec, counts, gather=gather)
    optimizer = torch.optim.SGD(net.parameters(), 0.3)
    generator = torch.Generator().manual_seed(7 + (rank if gather else 0))
    losses = []
    for _ in range(steps):
        logits, z = net(x)
        terms = criterion(logits, z, y, generator)
        optimizer.zero_grad()
        terms["loss"].backward()
        optimizer.step()
        rec.update(z, y, gather=gather)
        losses.append(torch.stack([terms["classification"], terms["contrast"], terms["synthetic"].float()]))
    return torch.stack(losses), rec


def mine(t, sizes):
    return t.split(sizes)[rank]


# the contrast alone, also with parts of different length: value and gradient
more, owner = F.normalize(torch.randn(5, 5, generator=torch.Generator().manual_seed(2)), dim=1), torch.tensor([2, 2, 2, 1, 1])
for name, sizes in parts.items():
    torch.manual_seed(0)
    alone, shared = Net(), Net()
    shared.load_state_dict(alone.state_dict())
    whole = BalancedSupConLoss(0.3)(alone(x)[1], y, more, owner)
    whole.backward()
    ddp = DistributedDataParallel(shared.body)
    part = BalancedSupConLoss(0.3, gather=True)(F.normalize(ddp(mine(x, sizes)), dim=1), mine(y, sizes), more, owner)
    part.backward()
    mean = part.detach() / 2
    dist.all_reduce(mean)
    torch.testing.assert_close(mean, whole.detach(), msg=lambda m: f"{name}: {m}")
    torch.testing.assert_close(shared.body.weight.grad, alone.body.weight.grad, msg=lambda m: f"{name}: {m}")

# not gathered, the two halves do not add up to the whole: the comparison above can fail
local = BalancedSupConLoss(0.3)(F.normalize(alone.body(mine(x, [20, 20])), dim=1), mine(y, [20, 20]), more, owner).detach() / 2
dist.all_reduce(local)
assert abs(local - whole.detach()) > 0.01

# six steps of training: losses, weights and statistics
torch.manual_seed(0)
alone, shared = Net(), Net()
shared.load_state_dict(alone.state_dict())
expected, rec_alone = trained(alone, x, y, gather=False)
start = shared.state_dict()
start = {k: v.clone() for k, v in start.items()}
for part, sizes in parts.items():
    shared.load_state_dict(start)
    losses, rec = trained(DistributedDataParallel(shared), mine(x, sizes), mine(y, sizes), gather=True)
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / 2, expected, atol=1e-4, rtol=1e-4, msg=lambda m: f"{part}: {m}")
    assert expected[-1, 2] > 0
    for name in ("body", "head"):
        ours, theirs = getattr(shared, name).weight, getattr(alone, name).weight
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, msg=lambda m: f"{part} {name}: {m}")
    for name in ("centers", "radii", "mean_angle", "std_angle"):
        ours, theirs = getattr(rec, name), getattr(rec_alone, name)
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3, msg=lambda m: f"{part} {name}: {m}")
    both = rec.centers.clone()
    dist.all_reduce(both)
    assert torch.equal(both / 2, rec.centers), "the processes' statistics differ"
dist.destroy_process_group()
print("equal", flush=True)
os._exit(0)  # gloo's threads may outlive the group, and abort a process that ends as usual
'''


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path):
    (tmp_path / "worker.py").write_text(WORKER, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "worker.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.count("equal") == 2
