/* The pool of threads behind pool.h. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_THREADS 256
#define SPIN_NS 60000                /* longer than the host takes between two kernels of a step */
#define OPEN 0x8000u                 /* in gate: threads may join the job */
#define JOINED 0x7fffu               /* in gate: threads that are in it */

/* gate is {generation, OPEN, JOINED} in one word, so that a thread joins a job only while the job lasts. A job's fields are
   written while no thread is in it and the gate is closed. */
static struct {
    _Atomic uint64_t gate __attribute__((aligned(64)));
    _Atomic int64_t next __attribute__((aligned(64)));
    int64_t tasks __attribute__((aligned(64)));
    Work work;
    void *with;
    int helpers;                     /* threads, beside the caller, that may take part */
    _Atomic uint32_t bell __attribute__((aligned(64)));      /* rung for every job; sleepers wait for it to change */
    _Atomic int sleepers;
    _Atomic int taken;               /* by a caller */
    int started;
} pool;

extern int omp_get_max_threads(void) __attribute__((weak));  /* of the runtime that torch has loaded */

int ridgeline_pool_threads(void) {
    int threads = omp_get_max_threads ? omp_get_max_threads() : 1;
    return threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static int64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000 + at.tv_nsec;
}

static void do_tasks(void) {
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (task >= pool.tasks) return;
        pool.work(pool.with, task);
    }
}

/* Join the open job of another generation than `seen`, and do what is left of it. */
static uint64_t try_to_help(int number, uint64_t seen) {
    uint64_t gate = atomic_load(&pool.gate);
    while (gate & OPEN && gate >> 16 != seen) {
        if (!atomic_compare_exchange_weak(&pool.gate, &gate, gate + 1)) continue;
        if (number < pool.helpers) do_tasks();
        atomic_fetch_sub(&pool.gate, 1);
        return gate >> 16;
    }
    return seen;
}

static void *helper(void *given) {
    int number = (int)(intptr_t)given;
    uint64_t seen = 0;
    for (;;) {
        int64_t idle_since = now();
        for (int turn = 1; ; turn++) {
            uint64_t last = seen;
            seen = try_to_help(number, seen);
            if (seen != last) idle_since = now(), turn = 1;
            relax();
            if (turn % 32 == 0 && now() - idle_since > SPIN_NS) break;
        }
        atomic_fetch_add(&pool.sleepers, 1);
        uint32_t bell = atomic_load(&pool.bell);
        uint64_t gate = atomic_load(&pool.gate);
        if (!(gate & OPEN) || gate >> 16 == seen) syscall(SYS_futex, &pool.bell, FUTEX_WAIT_PRIVATE, bell, 0, 0, 0);
        atomic_fetch_sub(&pool.sleepers, 1);
    }
    return 0;
}

static void forget_threads(void) {   /* in a forked child, which has none */
    pool.started = 0;
    atomic_store(&pool.gate, atomic_load(&pool.gate) >> 16 << 16);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.taken, 0);
}

static void start(int helpers) {
    static int watched;
    if (!watched) watched = 1, pthread_atfork(0, 0, forget_threads);
    for (; pool.started < helpers; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, helper, (void *)(intptr_t)pool.started)) return;
        pthread_detach(thread);
    }
}

void ridgeline_pool_run(int64_t tasks, Work work, void *with) {
    int threads = tasks > 1 ? ridgeline_pool_threads() : 1;
    if (threads == 1 || atomic_exchange(&pool.taken, 1)) {
        for (int64_t task = 0; task < tasks; task++) work(with, task);
        return;
    }
    if (pool.started < threads - 1) start(threads - 1);
    pool.tasks = tasks, pool.work = work, pool.with = with;
    pool.helpers = threads - 1;
    atomic_store(&pool.next, 0);
    uint64_t generation = (atomic_load(&pool.gate) >> 16) + 1;
    atomic_store(&pool.gate, generation << 16 | OPEN);
    atomic_fetch_add(&pool.bell, 1);
    if (atomic_load(&pool.sleepers)) syscall(SYS_futex, &pool.bell, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
    do_tasks();
    atomic_fetch_and(&pool.gate, ~(uint64_t)OPEN);
    for (int turn = 1; atomic_load(&pool.gate) & JOINED; turn++)
        if (turn % 1024) relax();
        else sched_yield();          /* a helper may wait for this core */
    atomic_store(&pool.taken, 0);
}
