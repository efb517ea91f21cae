"""FeatRecon's loss beside plain supervised contrast of as many columns, a training step with it, and drawing 10⁵ features."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from assay.bench.speed import Contest
from assay.perception import BalancedSupConLoss, FeatReconLoss, FeatureReconstructor

B, D, K = 128, 128, 10
generator = torch.Generator().manual_seed(0)
torch.manual_seed(0)
counts = (900 * 100.0 ** (-torch.arange(K) / (K - 1))).round().long()
y = torch.multinomial(counts.double(), B, replacement=True, generator=generator)
z = F.normalize(torch.randn(B, D, generator=generator) + 2 * torch.eye(K, D)[y], dim=1)
logits = torch.randn(B, K, generator=generator)
labels = torch.repeat_interleave(counts)
rec = FeatureReconstructor(K, D, counts)
rec.fit(F.normalize(torch.randn(len(labels), D, generator=generator) + 2 * torch.eye(K, D)[labels], dim=1), labels)
criterion = FeatReconLoss(rec, counts)
drawn = int(criterion(logits, z, y)["synthetic"])
extra = F.normalize(torch.randn(drawn + K, D, generator=generator), dim=1)
extra_labels = torch.arange(drawn + K) % K


def reference_supcon(anchors, columns, owner, of_columns, tau=0.1):
    """Khosla et al., as it is usually written: similarities, a stable softmax, the mean over positives."""
    similarity = anchors @ columns.T / tau
    similarity = similarity - similarity.amax(1, keepdim=True).detach()
    others = torch.ones_like(similarity)
    others[torch.arange(len(anchors)), torch.arange(len(anchors))] = 0
    positive = (owner[:, None] == of_columns).to(similarity.dtype) * others
    log_share = similarity - (similarity.exp() * others).sum(1, keepdim=True).log()
    return -((positive * log_share).sum(1) / positive.sum(1).clamp_min(1)).mean()


plain = BalancedSupConLoss(balanced=False, check=False)
balanced = BalancedSupConLoss(check=False)
columns, of_columns = torch.cat([z, extra]), torch.cat([y, extra_labels])
torch.testing.assert_close(plain(z, y, extra, extra_labels), reference_supcon(z, columns, y, of_columns))


def backward(loss):
    def once():
        anchors = z.clone().requires_grad_()
        loss(anchors).backward()
        return anchors.grad

    return once


ours = backward(lambda anchors: balanced(anchors, y, extra, extra_labels))
peer = backward(lambda anchors: reference_supcon(anchors, torch.cat([anchors, extra]), y, of_columns))

# A step of a small network at 32 × 32 pixels, with the same contrast but for the synthetic features and their statistics.
images = torch.randn(B, 3, 32, 32, generator=generator)
widths = (3, 16, 16, 32, 32, 64, 64)
blocks = [
    nn.Sequential(nn.Conv2d(a, b, 3, 2 - i % 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
    for i, (a, b) in enumerate(pairwise(widths))
]
body = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
head, projection = nn.Linear(64, K), nn.Linear(64, D)
parameters = [*body.parameters(), *head.parameters(), *projection.parameters()]
optimizer = torch.optim.SGD(parameters, 0.0)
without = FeatReconLoss(rec, counts, budget=0.0)
running = FeatureReconstructor(K, D, counts)


def step(loss, statistics):
    def once():
        features = body(images)
        unit = F.normalize(projection(features), dim=1)
        optimizer.zero_grad()
        loss(head(features), unit, y)["loss"].backward()
        optimizer.step()
        if statistics:
            running.update(unit, y)

    return once


many = torch.full((K,), 10_000)
mean = torch.zeros(K, D).index_add_(0, y, z)


def gaussian_draws():
    """As many rows of plain noise around the means, brought to length one: the floor of what drawing costs."""
    owner = torch.repeat_interleave(many)
    return F.normalize(mean[owner] + torch.randn(len(owner), D), dim=1)


contests = [
    Contest(
        f"balanced contrast, {B} × {B + drawn + K}, with gradient", ours=ours, peer=peer, peer_name="plain SupCon", target=1.25,
    ),
    Contest(
        "training step, small conv net", ours=step(criterion, True), peer=step(without, False),
        peer_name="the same without synthesis and statistics", target=1.1,
    ),
    Contest(
        "10⁵ features of 128 dimensions", ours=lambda: rec.sample(many), peer=gaussian_draws, peer_name="normalised noise",
        target=3.0, rounds=5,
    ),
]  # fmt: skip
