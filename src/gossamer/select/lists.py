"""From what rows take of clusters to ascending lists of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.group.tiles import Sorted
from gossamer.plan import KeyTokens
from gossamer.select.gpu import clustered as gpu
from gossamer.select.sample import Draws
from gossamer.select.trials import Trials

_CHUNK_BYTES = 64 << 20  # of the int64 lists held at once
_TRIAL_BYTES = 16 << 20  # the same for trials, whose lists are hashed, thrown, sorted and merged
_LAST = torch.iinfo(torch.int32).max  # sorts behind every key


def list_keys(taken: Tensor, keys: Sorted, *, width: int | None = None) -> KeyTokens:
    """List the first `taken` keys of each cluster.

    Args:
        taken: [B, H, R, C] int64, keys taken of each cluster in key order.
        keys: The keys sorted by cluster, over C clusters.
        width: Room for each row, where the caller knows a bound; None reads the counts (one
            synchronisation) and packs the rows without slack.

    Returns:
        The key rows, R per head.
    """
    if gpu.can_run(taken):
        return _list_on_gpu(taken, keys, width)
    return _list(taken, None, keys, width)


def list_draws(draws: Draws, keys: Sorted, *, width: int) -> KeyTokens:
    """List the certain and the drawn keys, with log weights -log(pi).

    Args:
        draws: What each row reads of each cluster, [B, H, R, C].
        keys: The keys sorted by cluster, over C clusters.
        width: Room for each row: an upper bound of its certain and drawn keys.

    Returns:
        The key rows, R per head, each entry weighted so that sums over it are unbiased.
    """
    if gpu.can_run(draws.taken):
        return laid_out(draws.taken.shape[:3], width, *gpu.list_draws(draws, keys, width))
    return _list(draws.taken, draws, keys, width)


def laid_out(
    shape: torch.Size, width: int, index: Tensor, log_weight: Tensor | None, count: Tensor
) -> KeyTokens:
    """Return rows of one width that lie one behind the other.

    Args:
        shape: B, H and R.
        width: Places of each row.
        index: [B * H * R * width] int32.
        log_weight: The same shape in float32; None for no weights.
        count: [B * H * R] int32, keys that each row reads.
    """
    start = torch.arange(count.numel(), device=count.device) * width
    return KeyTokens(
        start=start.view(shape), count=count.view(shape), index=index, log_weight=log_weight
    )


def list_trials(trials: Trials, keys: Sorted) -> KeyTokens:
    """List the keys that a row's trials read, each once, with their log weights.

    The number of trials is random, and reading the greatest of all rows is one synchronisation;
    rows then have room for all of them, so that nothing is cut off.

    Args:
        trials: What each row tries of each cluster, [B, H, R, C].
        keys: The keys sorted by cluster, over C clusters.

    Returns:
        The key rows, R per head, each entry weighted so that sums over it are unbiased.
    """
    batch, heads, num_rows, num_clusters = trials.taken.shape
    device = trials.taken.device
    singly = trials.taken.sum(-1).flatten()  # [B * H * R]
    tried = singly + trials.count.flatten()
    room = int(tried.max())
    head = torch.arange(batch * heads, device=device).repeat_interleave(num_rows)
    order, begin, size = (x.flatten(0, 1) for x in keys)
    pool, weights, counts = [], [], []
    chunk = max(1, _TRIAL_BYTES // (8 * max(room, num_clusters)))
    for part in torch.arange(len(tried), device=device).split(chunk):
        of_head = head[part]
        place = torch.arange(room, device=device).expand(len(part), -1)
        cluster, rank, kept = _tried(trials, part, place, singly[part])
        kept = kept & (place < tried[part, None])
        rank = rank.minimum(size[of_head].gather(1, cluster) - 1).clamp(min=0)
        source = (begin[of_head].gather(1, cluster) + rank).clamp(max=order.shape[1] - 1)
        index = order[of_head[:, None], source].int().masked_fill(~kept, _LAST)
        log_weight = trials.log_weight.flatten(0, 2)[part].gather(1, cluster)
        index, log_weight, hits, count = _merged(index, log_weight)
        if trials.repeats:
            log_weight = log_weight + hits.clamp(min=1).double().log()
        # Slack repeats the row's greatest key; a row without any key has no slack to read.
        greatest = index.gather(1, (count[:, None] - 1).clamp(min=0)) if room else index
        listed = torch.arange(room, device=device) < count[:, None]
        index = torch.where(listed, index, greatest.masked_fill(greatest == _LAST, 0))
        pool.append(index.flatten())
        weights.append(log_weight.float().masked_fill(~listed, 0.0).flatten())
        counts.append(count)
    start = torch.arange(len(tried), device=device) * room
    return KeyTokens(
        start=start.view(batch, heads, num_rows),
        count=torch.cat(counts).view(batch, heads, num_rows).int(),
        index=torch.cat(pool),
        log_weight=torch.cat(weights),
    )


def _tried(
    trials: Trials, part: Tensor, place: Tensor, singly: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cluster and rank [n, L] of the key at each place, and whether it is read."""
    num_rows, heads = trials.taken.shape[2], trials.taken.shape[1]
    head = trials.draw.heads[part // num_rows % heads][:, None]
    row = (part % num_rows)[:, None]
    taken, unit = (x.flatten(0, 2)[part] for x in (trials.taken, trials.unit))
    one_by_one = place < singly[:, None]
    cluster, rank = _first(taken, torch.where(one_by_one, place, 0))
    log_keep = trials.log_keep.flatten(0, 2)[part].gather(1, cluster)
    kept = ~one_by_one | trials.keeps(head, row, place, log_keep)

    size = trials.sizes.expand(trials.taken.shape).flatten(0, 2)[part]
    end = (unit * size).cumsum(1)
    last = end[:, -1:]  # a product that rounds up to it would hit behind the axis
    at = (trials.throws(head, row, place) * last).minimum(torch.nextafter(last, last * 0))
    # The first end above the point: a cluster without length is never the one.
    hit = torch.searchsorted(end, at, right=True).clamp(max=end.shape[1] - 1)
    length = unit.gather(1, hit)
    inside = (at - (end.gather(1, hit) - length * size.gather(1, hit))) / length.clamp(min=1e-300)
    inside = inside.masked_fill(one_by_one, 0.0).clamp(min=0).long()
    return torch.where(one_by_one, cluster, hit), torch.where(one_by_one, rank, inside), kept


def _merged(index: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge repeats of a key: indices [n, L] ascending, their weights and hits, and the counts [n].

    Places that are not read hold `_LAST` and fall behind all others.
    """
    index, by = index.sort(dim=1)
    new = torch.ones_like(index, dtype=torch.bool)
    new[:, 1:] = index[:, 1:] != index[:, :-1]
    run = new.cumsum(1) - 1
    # All of a run write the same number, so the order of writing does not matter.
    merged = torch.full_like(index, _LAST).scatter_(1, run, index)
    weight = torch.zeros_like(log_weight).scatter_(1, run, log_weight.gather(1, by))
    hits = torch.zeros_like(run).scatter_add_(1, run, torch.ones_like(run))
    return merged, weight, hits, (new & (index != _LAST)).sum(1)


def _list_on_gpu(taken: Tensor, keys: Sorted, width: int | None) -> KeyTokens:
    """Resolve clusters to keys by kernels; as `list_keys`."""
    shape, count = taken.shape[:3], taken.sum(-1).flatten()
    if width is not None:
        start = torch.arange(len(count), device=count.device) * width
        index = gpu.list_taken(taken, keys, start, len(count) * width, width)
        return laid_out(shape, width, index, None, count.int())
    start = count.cumsum(0) - count
    index = gpu.list_taken(taken, keys, start, int(count.sum()), None)
    return KeyTokens(
        start=start.view(shape), count=count.view(shape).int(), index=index, log_weight=None
    )


def _list(taken: Tensor, draws: Draws | None, keys: Sorted, width: int | None) -> KeyTokens:
    """Resolve clusters to keys, a bounded number of rows at a time."""
    batch, heads, num_rows, num_clusters = taken.shape
    device = taken.device
    count = taken.sum(-1).flatten()  # [B * H * R]
    if draws is not None:
        count = count + draws.count.flatten()
    room = int(count.max()) if width is None else width
    head = torch.arange(batch * heads, device=device).repeat_interleave(num_rows)
    order, begin, size = (x.flatten(0, 1) for x in keys)  # one line per head
    pool, weights = [], []
    chunk = max(1, _CHUNK_BYTES // (8 * max(room, num_clusters)))
    for part in torch.arange(len(count), device=device).split(chunk):
        of_head = head[part]
        place = torch.arange(room, device=device).expand(len(part), -1)
        listed = place < count[part, None]
        place = torch.where(listed, place, 0)
        cluster, rank = _first(taken.flatten(0, 2)[part], place)
        if draws is not None:
            cluster, rank = _drawn(draws, part, place, cluster, rank)
        rank = rank.minimum(size[of_head].gather(1, cluster) - 1).clamp(min=0)
        # Rows without any key resolve to some place, which is then not listed.
        source = (begin[of_head].gather(1, cluster) + rank).clamp(max=order.shape[1] - 1)
        index = order[of_head[:, None], source].int()
        index, by = index.masked_fill(~listed, _LAST).sort(dim=1)
        if width is None:
            pool.append(index[listed])
            continue
        # Slack repeats the row's greatest key; a row without any key has no slack to read.
        greatest = index.masked_fill(~listed, 0).amax(dim=1, keepdim=True) if room else index
        pool.append(torch.where(listed, index, greatest).flatten())
        if draws is not None:
            log_pi = draws.log_pi.flatten(0, 2)[part].gather(1, cluster.gather(1, by))
            weights.append((-log_pi).float().masked_fill(~listed, 0.0).flatten())
    start = torch.arange(len(count), device=device) * room
    if width is None:
        start = count.cumsum(0) - count
    return KeyTokens(
        start=start.view(batch, heads, num_rows),
        count=count.view(batch, heads, num_rows).int(),
        index=torch.cat(pool),
        log_weight=torch.cat(weights) if weights else None,
    )


def _first(taken: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return cluster and rank [n, L] of each place among the keys taken for certain [n, C]."""
    end = taken.cumsum(1)
    cluster = torch.searchsorted(end, place.contiguous(), right=True)
    cluster = cluster.clamp(max=taken.shape[1] - 1)
    return cluster, place - (end - taken).gather(1, cluster)


def _drawn(
    draws: Draws, part: Tensor, place: Tensor, cluster: Tensor, rank: Tensor
) -> tuple[Tensor, Tensor]:
    """Replace cluster and rank at the places behind a row's certain keys by those drawn."""
    num_taken = draws.taken.flatten(0, 2)[part].sum(1, keepdim=True)
    offset, log_pi = (x.flatten(0, 2)[part] for x in (draws.offset, draws.log_pi))
    threshold = draws.phase.flatten()[part, None] + (place - num_taken)
    # Clusters without probability share their offset with the next one: the last of equals holds
    # the threshold.
    drawn = (torch.searchsorted(offset, threshold, right=True) - 1).clamp(min=0)
    inside = (threshold - offset.gather(1, drawn)) / log_pi.gather(1, drawn).exp()
    is_sure = place < num_taken
    # What stands at certain places is not a number there; it is not used.
    inside = inside.masked_fill(is_sure, 0.0).long()
    return torch.where(is_sure, cluster, drawn), torch.where(is_sure, rank, inside)
