// What Open MPI, or another MPI, takes for the transfers that `mpmd bench` measures: messages to and
// fro between two processes, and rows that become columns over all of them. Each case is a line of
// JSON with the median, as `mpmd bench --json` prints it.
//
// mpicc -O2 mpi_transfers.c -o mpi_transfers && mpirun -n 2 mpi_transfers latency

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KIB 1024
#define MIB (1024 * KIB)
#define MOST_SAMPLES 2000

static int process, processes;

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *samples, int count) {
    qsort(samples, count, sizeof *samples, by_value);
    return samples[count / 2];
}

static void *bytes_of(size_t size) {
    void *bytes = malloc(size);
    if (bytes == NULL) {
        fprintf(stderr, "no memory for %zu bytes\n", size);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    memset(bytes, 1, size);
    return bytes;
}

static void print(const char *name, const char *parameters, double value, const char *unit) {
    if (process == 0) {
        printf("{\"name\":\"%s\",\"parameters\":\"%s\",\"median\":%g,\"unit\":\"%s\"}\n", name,
               parameters, value, unit);
    }
}

// Returns the median time, in seconds, of a message of `size` bytes from one process to the other:
// half of the time to and fro.
static double one_way(size_t size, int samples) {
    static double times[MOST_SAMPLES];
    char *bytes = bytes_of(size);
    // The first ones open connections and map memory.
    for (int sample = -5; sample < samples; sample++) {
        double begin = MPI_Wtime();
        if (process == 0) {
            MPI_Send(bytes, (int)size, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
            MPI_Recv(bytes, (int)size, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else if (process == 1) {
            MPI_Recv(bytes, (int)size, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Send(bytes, (int)size, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
        }
        if (sample >= 0) {
            times[sample] = (MPI_Wtime() - begin) / 2;
        }
    }
    free(bytes);
    return median(times, samples);
}

static void latency(void) {
    print("latency", "8, to and fro", 1e6 * one_way(8, 2000), "us");
    print("latency", "64Ki, to and fro", 1e6 * one_way(64 * KIB, 1000), "us");
    print("latency", "1Mi, to and fro", 1e6 * one_way(MIB, 300), "us");
    print("latency", "4Mi, to and fro", 1e6 * one_way(4 * MIB, 100), "us");
}

static void large(const char *name, int is_rate) {
    size_t size = 64 * MIB;
    double seconds = one_way(size, 30);
    if (is_rate) {
        print(name, "64Mi, to and fro", size / seconds / 1e9, "GB/s");
    } else {
        print(name, "64Mi, to and fro", 1e6 * seconds, "us");
    }
}

// Moves a square matrix of f32, `mib` MiB in all, from rows to columns over the processes.
static void rows_to_columns(int mib) {
    static double times[MOST_SAMPLES];
    int side = 1;
    while ((size_t)side * side * 4 < (size_t)mib * MIB) {
        side *= 2;
    }
    int width = side / processes;
    // A square matrix for 1, 4, 16 … MiB; otherwise twice as many rows as columns would fit.
    int rows = (int)((size_t)mib * MIB / 4 / side), height = rows / processes;

    float *source = bytes_of((size_t)height * side * 4);
    float *target = bytes_of((size_t)rows * width * 4);
    MPI_Datatype *out = bytes_of(processes * sizeof *out), *in = bytes_of(processes * sizeof *in);
    int *one = bytes_of(processes * sizeof *one), *zero = bytes_of(processes * sizeof *zero);
    for (int peer = 0; peer < processes; peer++) {
        one[peer] = 1;
        zero[peer] = 0;
        MPI_Type_create_subarray(2, (int[]){height, side}, (int[]){height, width},
                                 (int[]){0, peer * width}, MPI_ORDER_C, MPI_FLOAT, &out[peer]);
        MPI_Type_create_subarray(2, (int[]){rows, width}, (int[]){height, width},
                                 (int[]){peer * height, 0}, MPI_ORDER_C, MPI_FLOAT, &in[peer]);
        MPI_Type_commit(&out[peer]);
        MPI_Type_commit(&in[peer]);
    }

    int samples = mib > 16 ? 20 : 200;
    for (int sample = -3; sample < samples; sample++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        MPI_Alltoallw(source, one, zero, out, target, one, zero, in, MPI_COMM_WORLD);
        double mine = MPI_Wtime() - begin, slowest;
        MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (sample >= 0) {
            times[sample] = slowest;
        }
    }

    char parameters[40];
    snprintf(parameters, sizeof parameters, "%d MiB, %d processes", mib, processes);
    if (process == 0) {
        print("rows to columns", parameters, mib * (double)MIB / median(times, samples) / 1e9,
              "GB/s");
    }
    free(source);
    free(target);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &process);
    MPI_Comm_size(MPI_COMM_WORLD, &processes);
    const char *which = argc > 1 ? argv[1] : "";

    if (strcmp(which, "latency") == 0) {
        latency();
    } else if (strcmp(which, "bandwidth") == 0) {
        large("bandwidth", 1);
    } else if (strcmp(which, "handover") == 0) {
        large("handover", 0);
    } else if (strcmp(which, "reshard") == 0) {
        rows_to_columns(1);
        rows_to_columns(16);
        rows_to_columns(64);
    } else {
        fprintf(stderr, "mpi_transfers latency|bandwidth|handover|reshard\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    MPI_Finalize();
    return 0;
}
