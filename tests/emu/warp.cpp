/* Collectives of a warp: the lanes of a mask meet, the last one computes for all. */
#include "emu/scheduler.h"

#include <cmath>

namespace emu
{

void give(unsigned word, uint64_t value)
{
    here.thread->in[word] = value;
}

uint64_t got(unsigned word)
{
    return here.thread->out[word];
}

static void finish_meeting(Block &block, Meeting &meeting, const Thread *self)
{
    Thread *lanes[WARP];
    const unsigned arrived = meeting.arrived;
    memcpy(lanes, meeting.lanes, sizeof lanes);
    meeting.arrived = 0;
    meeting.generation++;
    meeting.what->complete(lanes, arrived);
    for (unsigned i = 0; i < WARP; i++)
        if ((arrived >> i & 1u) && lanes[i] != self) block.ready.push(static_cast<Task *>(lanes[i]));
}

void collective(const Collective &what, unsigned mask, const char *file, int line)
{
    Task &task = me();
    Block &block = *task.block;
    Warp &warp = block.warps[task.warp];
    if (!(mask >> task.lane & 1u))
        kernel_fault(file, line, "%s: lane %u is not in its own mask %08x", what.name, task.lane, mask);
    Meeting *meeting = nullptr, *unused = nullptr;
    for (Meeting &m : warp.meetings) {
        if (m.arrived && m.mask == mask)
            meeting = &m;
        else if (!m.arrived && !unused)
            unused = &m;
    }
    if (!meeting) {
        if (!unused) kernel_fault(file, line, "%s: more than %u different masks wait in one warp", what.name, MEETINGS);
        meeting = unused;
        meeting->what = &what;
        meeting->mask = mask;
        meeting->file = file;
        meeting->line = line;
    } else if (meeting->what != &what) {
        kernel_fault(file, line, "%s: other lanes of mask %08x wait in %s at %s:%d", what.name, mask,
                     meeting->what->name, meeting->file, meeting->line);
    }
    const unsigned slot = task.warp * MEETINGS + static_cast<unsigned>(meeting - warp.meetings);
    void *tag = block.shared.tags + WARP_TAGS + 8 * (2 * slot + meeting->generation % 2);
    if (what.orders_memory) tsan_release(tag);
    meeting->arrived |= 1u << task.lane;
    meeting->lanes[task.lane] = &task;
    if (meeting->arrived == (mask & warp.live))
        finish_meeting(block, *meeting, &task);
    else
        wait_here(block, what.name, file, line);
    if (what.orders_memory) tsan_acquire(tag);
}

void warp_thread_exits(Block &block, Task &task)
{
    Warp &warp = block.warps[task.warp];
    warp.live &= ~(1u << task.lane);
    for (Meeting &meeting : warp.meetings)
        if (meeting.arrived && meeting.arrived == (meeting.mask & warp.live)) finish_meeting(block, meeting, nullptr);
}

/* ---- what they compute ------------------------------------------------------------------------------------------- */

template <class F>
static void each_lane(unsigned mask, F f)
{
    for (unsigned i = 0; i < WARP; i++)
        if (mask >> i & 1u) f(i);
}

static void no_data(Thread *const *, unsigned)
{
}

static void do_shuffle(Thread *const *lanes, unsigned mask)
{
    each_lane(mask, [&](unsigned i) {
        const uint64_t from = lanes[i]->in[1];
        /* what a lane gives that does not take part is undefined: all ones here */
        lanes[i]->out[0] = from < WARP && (mask >> from & 1u) ? lanes[from]->in[0] : ~uint64_t(0);
    });
}

static void do_ballot(Thread *const *lanes, unsigned mask)
{
    uint64_t votes = 0;
    each_lane(mask, [&](unsigned i) { votes |= static_cast<uint64_t>(lanes[i]->in[0] != 0) << i; });
    each_lane(mask, [&](unsigned i) { lanes[i]->out[0] = votes; });
}

static void do_match_any(Thread *const *lanes, unsigned mask)
{
    each_lane(mask, [&](unsigned i) {
        uint64_t same = 0;
        each_lane(mask, [&](unsigned j) { same |= static_cast<uint64_t>(lanes[j]->in[0] == lanes[i]->in[0]) << j; });
        lanes[i]->out[0] = same;
    });
}

static void do_match_all(Thread *const *lanes, unsigned mask)
{
    const uint64_t value = lanes[__builtin_ctz(mask)]->in[0];
    bool all = true;
    each_lane(mask, [&](unsigned i) { all = all && lanes[i]->in[0] == value; });
    each_lane(mask, [&](unsigned i) { lanes[i]->out[0] = all ? mask : 0; });
}

template <class F>
static void reduce(Thread *const *lanes, unsigned mask, F f)
{
    uint64_t value = 0;
    bool first = true;
    each_lane(mask, [&](unsigned i) {
        const unsigned in = static_cast<unsigned>(lanes[i]->in[0]);
        value = first ? in : f(static_cast<unsigned>(value), in);
        first = false;
    });
    each_lane(mask, [&](unsigned i) { lanes[i]->out[0] = value; });
}

static void do_add(Thread *const *lanes, unsigned mask)
{
    reduce(lanes, mask, [](unsigned a, unsigned b) { return a + b; });
}
static void do_min(Thread *const *lanes, unsigned mask)
{
    reduce(lanes, mask, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
static void do_max(Thread *const *lanes, unsigned mask)
{
    reduce(lanes, mask, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
static void do_min_signed(Thread *const *lanes, unsigned mask)
{
    reduce(lanes, mask, [](unsigned a, unsigned b) { return static_cast<int>(a) < static_cast<int>(b) ? a : b; });
}
static void do_max_signed(Thread *const *lanes, unsigned mask)
{
    reduce(lanes, mask, [](unsigned a, unsigned b) { return static_cast<int>(a) > static_cast<int>(b) ? a : b; });
}
static void do_and(Thread *const *lanes, unsigned mask)
{
    reduce(lanes, mask, [](unsigned a, unsigned b) { return a & b; });
}
static void do_or(Thread *const *lanes, unsigned mask)
{
    reduce(lanes, mask, [](unsigned a, unsigned b) { return a | b; });
}
static void do_xor(Thread *const *lanes, unsigned mask)
{
    reduce(lanes, mask, [](unsigned a, unsigned b) { return a ^ b; });
}

const Collective syncwarp = {"__syncwarp", no_data, true};
const Collective shuffle = {"a shuffle", do_shuffle, false};
const Collective ballot = {"a vote", do_ballot, false};
const Collective match_any = {"__match_any_sync", do_match_any, false};
const Collective match_all = {"__match_all_sync", do_match_all, false};
const Collective reduce_add = {"__reduce_add_sync", do_add, false};
const Collective reduce_min = {"__reduce_min_sync", do_min, false};
const Collective reduce_max = {"__reduce_max_sync", do_max, false};
const Collective reduce_min_signed = {"__reduce_min_sync", do_min_signed, false};
const Collective reduce_max_signed = {"__reduce_max_sync", do_max_signed, false};
const Collective reduce_and = {"__reduce_and_sync", do_and, false};
const Collective reduce_or = {"__reduce_or_sync", do_or, false};
const Collective reduce_xor = {"__reduce_xor_sync", do_xor, false};

} // namespace emu
