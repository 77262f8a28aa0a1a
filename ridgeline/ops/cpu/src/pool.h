/* One pool of threads for all kernels of this library.

   The caller works too, and never waits for a thread that has not begun: on a busy machine it does all tasks itself. An idle
   thread spins shortly, because the next kernel of a step comes within microseconds, and then sleeps. Results must not depend
   on which thread does a task. */

#ifndef RIDGELINE_POOL_H
#define RIDGELINE_POOL_H

#include <stdint.h>

typedef void (*Work)(void *with, int64_t task);

/* work(with, task) for every task of 0..tasks-1, each once, on any thread; returns when all are done. A call from inside a
   task, or while another thread of the process uses the pool, runs its tasks alone. */
void ridgeline_pool_run(int64_t tasks, Work work, void *with);

/* The same, or all tasks in the calling thread where waking others costs more than they save. */
static inline void run_tasks(int64_t tasks, int is_worth_it, Work work, void *with) {
    if (is_worth_it) ridgeline_pool_run(tasks, work, with);
    else for (int64_t task = 0; task < tasks; task++) work(with, task);
}

/* Threads that a call uses: the intra-op setting of torch (its OpenMP runtime) in the calling thread. */
int ridgeline_pool_threads(void);

#endif
