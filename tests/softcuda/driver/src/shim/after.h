// The text after a program's kernels: it runs a block of threads on one thread of the CPU.
//
// The threads of a block run one after another on a fiber, which is a stack with hand-written
// switching. If a thread has to wait for others, its fiber is suspended and the next thread gets a
// new one. So a kernel without waits needs one fiber and is a plain loop.
#include <setjmp.h>
#include <ucontext.h>

// The driver's description of a launch; has the layout of `Launch` in `launch.rs`.
struct __sc_launch {
    unsigned grid[3], block[3];
    void *shared;
    char *stacks;
    unsigned long stack_bytes;
    // Jump buffer for the handler of faults; set while the kernel runs.
    void **escape;
};

namespace {

enum { FREE, READY, RUNNING, AT_BARRIER, IN_WARP };

struct Fiber {
    jmp_buf where;
    int state;
    bool started;
    unsigned thread;
    uint3 place;
    // The operation for which it waits in its warp, and the result.
    unsigned mask;
    int lane;
    __sc_kind kind;
    unsigned long long value, result;
};

constexpr unsigned MOST = 1024;

struct Runner {
    const __sc_launch *launch;
    void (*call)(char *);
    char *arguments;
    unsigned threads, next, ended, fibers;
    unsigned waiting, votes, last_votes;
    Fiber *running;
    // Fibers without a thread, ready for reuse.
    Fiber *free[MOST];
    unsigned free_count;
    Fiber *of_thread[MOST];
    unsigned ended_lanes[MOST / 32], waiting_lanes[MOST / 32];
    jmp_buf scheduler;
    sigjmp_buf *escape;
};

thread_local Runner *runner;

Fiber *fiber(Runner *r, unsigned at) {
    // The record of a fiber lies at the low end of its stack.
    return reinterpret_cast<Fiber *>(r->launch->stacks + at * r->launch->stack_bytes);
}

void release_block(Runner *r) {
    if (r->waiting == 0 || r->waiting < r->threads - r->ended) return;
    r->last_votes = r->votes;
    r->votes = r->waiting = 0;
    for (unsigned i = 0; i < r->fibers; i++)
        if (fiber(r, i)->state == AT_BARRIER) fiber(r, i)->state = READY;
}

// Returns the lanes of a warp that exist and have not ended.
unsigned live_lanes(Runner *r, unsigned warp) {
    unsigned there = r->threads - warp * 32;
    return (there >= 32 ? 0xffffffffu : (1u << there) - 1) & ~r->ended_lanes[warp];
}

// For each waiting lane from `lane` to `last`: once all live lanes of its mask wait too, computes
// their results and makes them ready.
void release_warp(Runner *r, unsigned warp, unsigned lane, unsigned last) {
    for (; lane <= last; lane++) {
        if (!(r->waiting_lanes[warp] >> lane & 1)) continue;
        unsigned need = r->of_thread[warp * 32 + lane]->mask & live_lanes(r, warp);
        if ((r->waiting_lanes[warp] & need) != need || !(need >> lane & 1)) continue;
        unsigned long long ballot = 0, sum = 0, low = ~0ull, high = 0;
        for (unsigned other = 0; other < 32; other++) {
            if (!(need >> other & 1)) continue;
            unsigned long long value = r->of_thread[warp * 32 + other]->value;
            ballot |= (value & 1) << other;
            sum += value;
            low = value < low ? value : low;
            high = value > high ? value : high;
        }
        for (unsigned other = 0; other < 32; other++) {
            if (!(need >> other & 1)) continue;
            Fiber *f = r->of_thread[warp * 32 + other];
            unsigned from = (unsigned)f->lane & 31;
            switch (f->kind) {
            case __sc_read_lane:
                // A lane outside the mask has no value: undefined in CUDA, garbage here.
                f->result = need >> from & 1 ? r->of_thread[warp * 32 + from]->value : 0xCDCDCDCDCDCDCDCDull;
                break;
            case __sc_ballot: f->result = ballot; break;
            case __sc_add: f->result = sum & 0xffffffffu; break;
            case __sc_min: f->result = low; break;
            case __sc_max: f->result = high; break;
            }
            f->state = READY;
        }
        r->waiting_lanes[warp] &= ~need;
    }
}

// Suspends the running fiber until it is ready again.
void leave(Runner *r) {
    Fiber *f = r->running;
    if (_setjmp(f->where) == 0) _longjmp(r->scheduler, 1);
}

void fiber_main() {
    for (;;) {
        Runner *r = runner;
        while (r->next < r->threads) {
            Fiber *f = r->running;
            unsigned t = f->thread = r->next++;
            r->of_thread[t] = f;
            const unsigned *size = r->launch->block;
            f->place = {t % size[0], t / size[0] % size[1], t / size[0] / size[1]};
            __sc_here.thread = f->place;
            r->call(r->arguments);
            r->ended++;
            r->ended_lanes[t / 32] |= 1u << t % 32;
            if (r->waiting_lanes[t / 32]) release_warp(r, t / 32, 0, 31);
            if (r->waiting) release_block(r);
        }
        r->running->state = FREE;
        r->free[r->free_count++] = r->running;
        leave(r);
    }
}

void resume(Runner *r, Fiber *f) {
    r->running = f;
    f->state = RUNNING;
    __sc_here.thread = f->place;
    if (_setjmp(r->scheduler) != 0) return;
    if (f->started) _longjmp(f->where, 1);
    f->started = true;
    ucontext_t context, back;
    getcontext(&context);
    context.uc_stack.ss_sp = (char *)f + sizeof(Fiber);
    context.uc_stack.ss_size = r->launch->stack_bytes - sizeof(Fiber);
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    swapcontext(&back, &context);
}

// Returns a fiber for a thread that has not begun.
Fiber *unused(Runner *r) {
    if (r->free_count > 0) return r->free[--r->free_count];
    Fiber *f = fiber(r, r->fibers++);
    f->state = FREE;
    f->started = false;
    return f;
}

// Runs one block to its end. Returns false if all its threads wait for one another.
bool run_block(Runner *r) {
    r->next = r->ended = r->waiting = r->votes = 0;
    for (unsigned warp = 0; warp * 32 < r->threads; warp++) r->ended_lanes[warp] = r->waiting_lanes[warp] = 0;
    while (r->ended < r->threads) {
        bool moved = false;
        while (r->next < r->threads) {
            resume(r, unused(r));
            moved = true;
        }
        for (unsigned i = 0; i < r->fibers; i++)
            if (fiber(r, i)->state == READY) {
                resume(r, fiber(r, i));
                moved = true;
            }
        if (!moved) return false;
    }
    return true;
}

} // namespace

static unsigned __sc_lane() { return runner->running->thread % 32; }

static void __sc_stop(int code) { siglongjmp(*runner->escape, code); }

static void __sc_block_barrier(int, bool value, int *result) {
    Runner *r = runner;
    r->waiting++;
    r->votes += value;
    r->running->state = AT_BARRIER;
    release_block(r);
    if (r->running->state == AT_BARRIER) leave(r);
    else r->running->state = RUNNING;
    if (result) *result = (int)runner->last_votes;
}

static unsigned long long __sc_warp(unsigned mask, unsigned long long value, int lane, __sc_kind kind) {
    Runner *r = runner;
    Fiber *f = r->running;
    unsigned warp = f->thread / 32;
    f->mask = mask;
    f->value = value;
    f->lane = lane;
    f->kind = kind;
    f->state = IN_WARP;
    r->waiting_lanes[warp] |= 1u << f->thread % 32;
    release_warp(r, warp, f->thread % 32, f->thread % 32);
    if (f->state == IN_WARP) leave(r);
    else f->state = RUNNING;
    return f->result;
}

// Runs a kernel. Returns 0 or its error code; 700 comes from the driver's handler of faults.
extern "C" int __sc_run(void (*call)(char *), char *arguments, const __sc_launch *launch) {
    sigjmp_buf escape;
    Runner r;
    r.launch = launch;
    r.call = call;
    r.arguments = arguments;
    r.threads = launch->block[0] * launch->block[1] * launch->block[2];
    r.fibers = r.free_count = 0;
    r.escape = &escape;
    runner = &r;
    __sc_here.size = dim3(launch->block[0], launch->block[1], launch->block[2]);
    __sc_here.grid = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
    __sc_here.shared = launch->shared;
    int code = sigsetjmp(escape, 1);
    if (code == 0) {
        *launch->escape = &escape;
        for (unsigned z = 0; z < launch->grid[2] && code == 0; z++)
            for (unsigned y = 0; y < launch->grid[1] && code == 0; y++)
                for (unsigned x = 0; x < launch->grid[0] && code == 0; x++) {
                    __sc_here.block = {x, y, z};
                    if (!run_block(&r)) code = 702;
                }
    }
    *launch->escape = nullptr;
    runner = nullptr;
    return code;
}

// The driver's description of a kernel. `call` takes the arguments packed one after another, each
// at a multiple of 16 bytes.
struct __sc_kernel {
    const char *name;
    void *address;
    void (*call)(char *);
    unsigned count;
    const unsigned *sizes;
    const unsigned char *pointers;
    // The most threads of a block, from `__launch_bounds__`.
    unsigned threads;
};

template <unsigned... I> struct __sc_list {};
template <class T> struct __sc_is_pointer { static constexpr bool value = false; };
template <class T> struct __sc_is_pointer<T *> { static constexpr bool value = true; };

template <class T> struct __sc_adapter;
template <class... A> struct __sc_adapter<void (*)(A...)> {
    static constexpr unsigned count = sizeof...(A);
    static constexpr unsigned sizes[sizeof...(A) + 1] = {(unsigned)sizeof(A)..., 0};
    static constexpr unsigned char pointers[sizeof...(A) + 1] = {__sc_is_pointer<A>::value..., 0};
    static constexpr unsigned offset(unsigned at) {
        unsigned sum = 0;
        for (unsigned i = 0; i < at; i++) sum += (sizes[i] + 15) / 16 * 16;
        return sum;
    }
    template <void (*F)(A...), unsigned... I> static void with(char *a, __sc_list<I...>) {
        (void)a;
        F(*(A *)(a + offset(I))...);
    }
    template <void (*F)(A...)> static void call(char *a) { with<F>(a, __sc_list<__integer_pack(sizeof...(A))...>()); }
};

#define __SC_KERNEL(text, threads, ...)                                                                                    \
    {text, (void *)(__VA_ARGS__), &__sc_adapter<decltype(__VA_ARGS__)>::call<(__VA_ARGS__)>,                       \
     __sc_adapter<decltype(__VA_ARGS__)>::count, __sc_adapter<decltype(__VA_ARGS__)>::sizes,                       \
     __sc_adapter<decltype(__VA_ARGS__)>::pointers, (unsigned)(threads)}
