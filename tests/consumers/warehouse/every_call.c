/* Counts the calls by which a process changes what lies below a directory, and kills it with SIGKILL before the nth.

   Preloaded (LD_PRELOAD), it stands before the functions of libc. `every_call_arm(root, nth)` begins: from then on calls
   about paths below root, or about files that lie there, are counted over all threads. `every_call_count` says how many
   there were; every_call_names has the name of each, 16 bytes, as far as there is room. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define ROOM 4096
static char root[4096];
static size_t length;
static atomic_long count;
static long wanted;
static atomic_int armed;
char every_call_names[ROOM][16];

void every_call_arm(const char *where, long nth) {
    snprintf(root, sizeof root, "%s", where);
    length = strlen(root);
    wanted = nth;
    atomic_store(&count, 0);
    atomic_store(&armed, 1);
}

long every_call_count(void) {
    atomic_store(&armed, 0);
    return atomic_load(&count);
}

static void pass(const char *name, const char *path) {
    if (strncmp(path, root, length) != 0) return;
    long number = atomic_fetch_add(&count, 1) + 1;
    if (number <= ROOM) snprintf(every_call_names[number - 1], 16, "%s", name);
    if (number == wanted) kill(getpid(), SIGKILL);
}

static void of_path(const char *name, const char *path) {
    if (atomic_load(&armed) && path) pass(name, path);
}

static void of_file(const char *name, int file) {
    char link[64], path[4096];
    if (!atomic_load(&armed)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return;
    path[size] = 0;
    pass(name, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(type, name, parameters, arguments, told) \
    type name parameters { told; return REAL(name) arguments; }

WRAP(ssize_t, write, (int f, const void *b, size_t n), (f, b, n), of_file("write", f))
WRAP(ssize_t, pwrite, (int f, const void *b, size_t n, off_t o), (f, b, n, o), of_file("pwrite", f))
WRAP(ssize_t, pwrite64, (int f, const void *b, size_t n, off64_t o), (f, b, n, o), of_file("pwrite", f))
WRAP(ssize_t, writev, (int f, const struct iovec *v, int n), (f, v, n), of_file("writev", f))
WRAP(int, ftruncate, (int f, off_t n), (f, n), of_file("ftruncate", f))
WRAP(int, ftruncate64, (int f, off64_t n), (f, n), of_file("ftruncate", f))
WRAP(int, fsync, (int f), (f), of_file("fsync", f))
WRAP(int, fdatasync, (int f), (f), of_file("fdatasync", f))
WRAP(int, mkdir, (const char *p, mode_t m), (p, m), of_path("mkdir", p))
WRAP(int, rename, (const char *a, const char *b), (a, b), of_path("rename", a))
WRAP(int, renameat, (int d, const char *a, int e, const char *b), (d, a, e, b), of_path("rename", a))
WRAP(int, link, (const char *a, const char *b), (a, b), of_path("link", b))
WRAP(int, linkat, (int d, const char *a, int e, const char *b, int g), (d, a, e, b, g), of_path("link", b))
WRAP(int, symlink, (const char *a, const char *b), (a, b), of_path("symlink", b))
WRAP(int, unlink, (const char *p), (p), of_path("unlink", p))
WRAP(int, unlinkat, (int d, const char *p, int g), (d, p, g), of_path("unlink", p))
WRAP(int, rmdir, (const char *p), (p), of_path("rmdir", p))

#define OPENS(name) \
    int name(const char *p, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (flags & (O_CREAT | O_TRUNC)) of_path("create", p); \
        return REAL(name)(p, flags, mode); \
    }
OPENS(open)
OPENS(open64)

/* A library that is opened so looks into its own dependencies first, and would find libc there. */
void *dlopen(const char *name, int flags) { return REAL(dlopen)(name, flags & ~RTLD_DEEPBIND); }

long syscall(long number, ...) {
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == 316) of_path("rename", (const char *)a[1]); /* renameat2 on x86-64: the one that moves parts */
    return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
