"""What a step does to a tier of a few streams, as `kv_paging.step.plan_step` says it."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def planned(
    choice,
    place,
    lengths,
    stream,
    here,
    count,
    TIER: tl.constexpr,
    TIERS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The plan of a tier: slots, and what is marked.

    Returns the victim's slot, whether it leaves, whether the candidate takes its slot, whether it
    goes to a later tier, whether another victim arrives here, whether the candidate enters at a new
    slot, the length without the victim, the candidate's new slot, and where the last page is
    emptied, and the victim's and the candidate's are opened.
    """
    candidate = tl.load(choice[0] + stream, here, other=255).to(tl.int32)
    victim = tl.load(choice[1] + stream, here, other=255).to(tl.int32)
    target = tl.load(choice[2] + stream, here, other=255).to(tl.int32)
    known = here & (victim < TIERS)
    slot = tl.load(place + victim.to(tl.int64) * count + stream, known, other=-1)
    moves = known & (slot >= 0)
    leaves = moves & (victim == TIER)
    stays = here & (candidate == TIER)
    swap = leaves & stays
    gone = leaves & (candidate != TIER)
    goes = leaves & (target > TIER) & (target < TIERS)
    arrives = moves & (victim < TIER) & (target == TIER)
    enters = stays & (swap == 0)
    end = tl.load(lengths + stream, here, other=0) - gone.to(tl.int32)
    entry = end + arrives.to(tl.int32)
    emptied = gone & (end % TOKENS == 0)
    opened = arrives & (end % TOKENS == 0)
    begun = enters & (entry % TOKENS == 0)
    return slot, gone, swap, goes, arrives, enters, end, entry, emptied, opened, begun
