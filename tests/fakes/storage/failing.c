/* A file system that fails at the n-th call of a kind, for LD_PRELOAD.

   Only calls on files at or below the armed folder count. What happens at that call:
     REFUSED  nothing is done, and the error is said
     LOST     the call is carried out, and the error is said all the same: the answer of a file
              server that was lost on its way
     SHORT    a write takes half of what it was given; no error is said
*/
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { REFUSED, LOST, SHORT };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX];
static char wanted[32];
static int first, last, number, manner, calls;

/* Break calls `from` to `until` (counted from 1) of `kind` at or below `path`. */
void failing_arm(const char *path, const char *kind, int from, int until, int error, int how)
{
    pthread_mutex_lock(&lock);
    snprintf(folder, sizeof folder, "%s", path);
    snprintf(wanted, sizeof wanted, "%s", kind);
    first = from, last = until, number = error, manner = how, calls = 0;
    pthread_mutex_unlock(&lock);
}

/* Calls of the armed kind since it was armed. */
int failing_disarm(void)
{
    pthread_mutex_lock(&lock);
    folder[0] = 0;
    pthread_mutex_unlock(&lock);
    return calls;
}

static int is_below(const char *path)
{
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int is_due(const char *kind, const char *path)
{
    int due = 0;
    pthread_mutex_lock(&lock);
    if (!strcmp(kind, wanted) && is_below(path)) {
        calls++;
        due = calls >= first && calls <= last;
    }
    pthread_mutex_unlock(&lock);
    return due;
}

static const char *path_of(int fd, const char *name, char *buffer)
{
    char link[64];
    ssize_t length;
    buffer[0] = 0;
    if (name && (name[0] == '/' || fd == AT_FDCWD))
        return name;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, buffer, PATH_MAX / 2);
    buffer[length < 0 ? 0 : length] = 0;
    if (name)
        snprintf(buffer + strlen(buffer), PATH_MAX / 2, "/%s", name);
    return buffer;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define BREAK(kind, fd, name, failed, call)              \
    do {                                                 \
        char buffer[PATH_MAX];                           \
        if (!is_due(kind, path_of(fd, name, buffer)))    \
            return call;                                 \
        if (manner == LOST)                              \
            call;                                        \
        errno = number;                                  \
        return failed;                                   \
    } while (0)

#define OPEN(name, parameters, fd, path, ...)                                        \
    int name parameters                                                              \
    {                                                                                \
        va_list rest;                                                                \
        int mode = 0;                                                                \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                       \
            va_start(rest, flags);                                                   \
            mode = va_arg(rest, int);                                                \
            va_end(rest);                                                            \
        }                                                                            \
        BREAK(flags & O_CREAT ? "create" : "open", fd, path, -1,                     \
              REAL(name)(__VA_ARGS__, flags, mode));                                 \
    }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, path)
OPEN(openat, (int fd, const char *path, int flags, ...), fd, path, fd, path)
OPEN(openat64, (int fd, const char *path, int flags, ...), fd, path, fd, path)

DIR *opendir(const char *path) { BREAK("list", AT_FDCWD, path, NULL, REAL(opendir)(path)); }
int mkdir(const char *path, mode_t mode) { BREAK("mkdir", AT_FDCWD, path, -1, REAL(mkdir)(path, mode)); }
int rmdir(const char *path) { BREAK("rmdir", AT_FDCWD, path, -1, REAL(rmdir)(path)); }
int unlink(const char *path) { BREAK("unlink", AT_FDCWD, path, -1, REAL(unlink)(path)); }
int unlinkat(int fd, const char *path, int flags)
{
    BREAK("unlink", fd, path, -1, REAL(unlinkat)(fd, path, flags));
}
int rename(const char *from, const char *to) { BREAK("rename", AT_FDCWD, from, -1, REAL(rename)(from, to)); }
int renameat2(int fd, const char *from, int other, const char *to, unsigned flags)
{
    BREAK("renameat2", fd, from, -1, REAL(renameat2)(fd, from, other, to, flags));
}
int stat64(const char *path, struct stat64 *into) { BREAK("stat", AT_FDCWD, path, -1, REAL(stat64)(path, into)); }
int lstat64(const char *path, struct stat64 *into) { BREAK("stat", AT_FDCWD, path, -1, REAL(lstat64)(path, into)); }
int fstat64(int fd, struct stat64 *into) { BREAK("fstat", fd, NULL, -1, REAL(fstat64)(fd, into)); }
int fsync(int fd) { BREAK("fsync", fd, NULL, -1, REAL(fsync)(fd)); }
int fdatasync(int fd) { BREAK("fdatasync", fd, NULL, -1, REAL(fdatasync)(fd)); }
int close(int fd)
{
    char buffer[PATH_MAX];
    int due = is_due("close", path_of(fd, NULL, buffer));
    int result = REAL(close)(fd); /* Linux always lets go of the descriptor */
    if (!due)
        return result;
    errno = number;
    return -1;
}
ssize_t read(int fd, void *into, size_t size) { BREAK("read", fd, NULL, -1, REAL(read)(fd, into, size)); }
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
    BREAK("read", fd, NULL, -1, REAL(preadv64v2)(fd, parts, count, offset, flags));
}
ssize_t pread64(int fd, void *into, size_t size, off64_t offset)
{
    BREAK("read", fd, NULL, -1, REAL(pread64)(fd, into, size, offset));
}
ssize_t write(int fd, const void *from, size_t size)
{
    char buffer[PATH_MAX];
    if (!is_due("write", path_of(fd, NULL, buffer)))
        return REAL(write)(fd, from, size);
    if (manner == SHORT)
        return REAL(write)(fd, from, (size + 1) / 2);
    if (manner == LOST)
        REAL(write)(fd, from, size);
    errno = number;
    return -1;
}
ssize_t writev(int fd, const struct iovec *parts, int count)
{
    char buffer[PATH_MAX];
    if (!is_due("write", path_of(fd, NULL, buffer)))
        return REAL(writev)(fd, parts, count);
    if (manner == SHORT)
        return REAL(write)(fd, parts[0].iov_base, (parts[0].iov_len + 1) / 2);
    if (manner == LOST)
        REAL(writev)(fd, parts, count);
    errno = number;
    return -1;
}
