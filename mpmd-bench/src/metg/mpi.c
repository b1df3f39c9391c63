/* The task graphs of `mpmd bench metg` over MPI.
 *
 * Usage: PROGRAM POINTS BYTES. Each rank has POINTS points of every row, and a task's output has
 * BYTES bytes. Rank 0 reads one run per line from its standard input: pattern, rows, rounds,
 * iterations of a task. It prints the seconds of the run and the number of tasks. The program ends
 * with its input.
 *
 * For every row a rank starts all receives and sends, waits for them, and runs its tasks. Ranks
 * sleep between runs, so that they do not disturb other measurements.
 */

#define _GNU_SOURCE
#include <mpi.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* The time limit of a run in seconds. */
#define RUN_WITHIN 60
/* The time between two looks for the next run, in nanoseconds. */
#define NAP 10000000
/* Values of a task's computation. */
#define VALUES 64

enum pattern { TRIVIAL, STENCIL, FFT, TREE, ALL_TO_ALL };

/* One message: its memory, the other rank, and the tag. */
struct message {
    long *memory;
    int rank, tag;
};

/* A copy of an output of this rank to an input of this rank. */
struct copy {
    const long *from;
    long *to;
};

/* A task of this rank: its point, and the range of its inputs among those of the plan. */
struct task {
    long point;
    size_t first, end;
};

/* The part of this rank in a row. Rows with equal keys have the same plan. */
struct plan {
    /* The row's number within the pattern's period, its width, and the width of the row before. */
    long key[3];
    struct message *receive, *send;
    struct copy *copy;
    struct task *task;
    size_t receives, sends, copies, tasks;
    /* The point that makes each input, and the memory of all inputs. */
    long *maker, *input;
};

static int rank, ranks;
static long points, width, words;
/* The outputs of this rank's points. */
static long *outputs;

static void *allocate(size_t count, size_t size) {
    void *memory = calloc(count > 0 ? count : 1, size);
    if (memory == NULL) {
        fprintf(stderr, "rank %d is out of memory\n", rank);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return memory;
}

static int owner(long point) { return (int)(point / points); }

static long *output_of(long point) { return outputs + (point - rank * points) * words; }

/* Points are counted within their rank, so that a tag has at most 14 bits. */
static int tag_of(long from, long to) { return (int)(from % points << 7 | to % points); }

static long width_at(int pattern, long step) {
    if (step < 0) return 0;
    if (pattern == TREE && step < 62 && 1L << step < width) return 1L << step;
    return width;
}

/* The number of the row within the pattern's period. */
static long set_at(int pattern, long step) {
    long period = 0;
    while (1L << period < width) period++;
    return pattern == FFT && period > 0 ? (step + period - 1) % period : 0;
}

static bool depends(int pattern, long set, long to, long from) {
    long distance = labs(to - from);
    switch (pattern) {
        case STENCIL: return distance <= 1;
        case FFT: return distance == 0 || distance == 1L << set;
        case TREE: return from == to / 2;
        case ALL_TO_ALL: return true;
        default: return false;
    }
}

static struct plan make_plan(int pattern, const long key[3]) {
    size_t most = (size_t)(points * width);
    struct plan plan = {
        .receive = allocate(most, sizeof(struct message)),
        .send = allocate(most, sizeof(struct message)),
        .copy = allocate(most, sizeof(struct copy)),
        .task = allocate((size_t)points, sizeof(struct task)),
        .maker = allocate(most, sizeof(long)),
        .input = allocate(most * (size_t)words, sizeof(long)),
    };
    memcpy(plan.key, key, sizeof plan.key);
    long set = key[0], now = key[1], before = key[2];
    size_t inputs = 0;
    for (long own = rank * points; own < (rank + 1) * points; own++) {
        size_t first = inputs;
        for (long from = 0; own < now && from < before; from++) {
            if (!depends(pattern, set, own, from)) continue;
            long *memory = plan.input + inputs * (size_t)words;
            plan.maker[inputs++] = from;
            if (owner(from) == rank)
                plan.copy[plan.copies++] = (struct copy){output_of(from), memory};
            else
                plan.receive[plan.receives++] =
                    (struct message){memory, owner(from), tag_of(from, own)};
        }
        if (own < now) plan.task[plan.tasks++] = (struct task){own, first, inputs};
        for (long to = 0; own < before && to < now; to++) {
            if (owner(to) != rank && depends(pattern, set, to, own))
                plan.send[plan.sends++] =
                    (struct message){output_of(own), owner(to), tag_of(own, to)};
        }
    }
    return plan;
}

static void free_plan(struct plan *plan) {
    free(plan->receive);
    free(plan->send);
    free(plan->copy);
    free(plan->task);
    free(plan->maker);
    free(plan->input);
}

/* The same computation as in task.rs. Each iteration reads and writes all values. */
static __attribute__((noinline)) void compute(long iterations) {
    double values[VALUES];
    for (int i = 0; i < VALUES; i++) values[i] = -0.5;
    for (long n = 0; n < iterations; n++) {
        for (int i = 0; i < VALUES; i++) values[i] = values[i] * values[i] + values[i];
        __asm__ volatile("" : : "r"(values) : "memory");
    }
}

static void run_task(const struct plan *plan, const struct task *task, long step, long iterations) {
    for (size_t input = task->first; input < task->end; input++) {
        const long *found = plan->input + input * (size_t)words;
        for (long word = 0; word < words; word += 2) {
            if (found[word] == step - 1 && found[word + 1] == plan->maker[input]) continue;
            fprintf(stderr, "step %ld, point %ld: an input is (%ld, %ld), not (%ld, %ld)\n", step,
                    task->point, found[word], found[word + 1], step - 1, plan->maker[input]);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
    compute(iterations);
    long *output = output_of(task->point);
    for (long word = 0; word < words; word += 2) {
        output[word] = step;
        output[word + 1] = task->point;
    }
}

static void run_row(const struct plan *plan, MPI_Request *requests, long step, long iterations) {
    int count = 0;
    for (size_t i = 0; i < plan->receives; i++) {
        const struct message *it = &plan->receive[i];
        MPI_Irecv(it->memory, (int)words, MPI_LONG, it->rank, it->tag, MPI_COMM_WORLD,
                  &requests[count++]);
    }
    for (size_t i = 0; i < plan->sends; i++) {
        const struct message *it = &plan->send[i];
        MPI_Isend(it->memory, (int)words, MPI_LONG, it->rank, it->tag, MPI_COMM_WORLD,
                  &requests[count++]);
    }
    for (size_t i = 0; i < plan->copies; i++)
        memcpy(plan->copy[i].to, plan->copy[i].from, (size_t)words * sizeof(long));
    if (count > 0) MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
    for (size_t i = 0; i < plan->tasks; i++) run_task(plan, &plan->task[i], step, iterations);
}

/* The seconds of the clock that all processes of this machine share. */
static double clock_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Runs a graph `rounds` times, and prints the result on rank 0: the time from the first start of a
 * rank to the last end. With fewer cores than ranks, some start late. */
static void run(int pattern, long rows, long rounds, long iterations) {
    struct plan *plans = allocate((size_t)rows, sizeof(struct plan));
    struct plan **plan_of_row = allocate((size_t)rows, sizeof(struct plan *));
    size_t made = 0, most = 0;
    long tasks = 0;
    for (long row = 0; row < rows; row++) {
        long key[3] = {set_at(pattern, row), width_at(pattern, row), width_at(pattern, row - 1)};
        size_t found = 0;
        while (found < made && memcmp(plans[found].key, key, sizeof key) != 0) found++;
        if (found == made) {
            struct plan plan = make_plan(pattern, key);
            if (plan.receives + plan.sends > most) most = plan.receives + plan.sends;
            plans[made++] = plan;
        }
        plan_of_row[row] = &plans[found];
        tasks += (long)plans[found].tasks * rounds;
    }
    MPI_Request *requests = allocate(most, sizeof(MPI_Request));
    MPI_Barrier(MPI_COMM_WORLD);
    double start = clock_now();
    for (long round = 0; round < rounds; round++)
        for (long row = 0; row < rows; row++)
            run_row(plan_of_row[row], requests, row, iterations);
    double end = clock_now(), first, last;
    long all;
    MPI_Reduce(&start, &first, 1, MPI_DOUBLE, MPI_MIN, 0, MPI_COMM_WORLD);
    MPI_Reduce(&end, &last, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&tasks, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("%.9f %ld\n", last - first, all);
        fflush(stdout);
    }
    for (size_t i = 0; i < made; i++) free_plan(&plans[i]);
    free(plans);
    free(plan_of_row);
    free(requests);
}

/* Reads the next run on rank 0 and tells it to all. False at the end of the input. */
static bool next_run(long job[4]) {
    char line[128];
    if (rank == 0 && (fgets(line, sizeof line, stdin) == NULL ||
                      sscanf(line, "%ld %ld %ld %ld", job, job + 1, job + 2, job + 3) != 4))
        job[0] = -1;
    MPI_Request told;
    int arrived = 0;
    MPI_Ibcast(job, 4, MPI_LONG, 0, MPI_COMM_WORLD, &told);
    for (;;) {
        MPI_Test(&told, &arrived, MPI_STATUS_IGNORE);
        if (arrived) return job[0] >= 0;
        nanosleep(&(struct timespec){.tv_nsec = NAP}, NULL);
    }
}

int main(int argc, char **argv) {
    /* The ranks end with the program that has started them. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 3) return 2;
    points = atol(argv[1]);
    words = atol(argv[2]) / (long)sizeof(long);
    width = points * ranks;
    outputs = allocate((size_t)(points * words), sizeof(long));
    long job[4];
    while (next_run(job)) {
        alarm(RUN_WITHIN);
        run((int)job[0], job[1], job[2], job[3]);
        alarm(0);
    }
    MPI_Finalize();
    return 0;
}
