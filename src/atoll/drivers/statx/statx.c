/* Makes `ls` and `stat` work under older gVisors.
 *
 * gVisor of 2022 and before answers EINVAL to statx and fstatat with AT_NO_AUTOMOUNT, which coreutils 9.1 and newer
 * always pass. Nothing inside a sandbox automounts, so the flag can be dropped. This library is preloaded into
 * dynamically linked programs of such sandboxes; it needs only the C library that the program has. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

extern int *__errno_location(void);

#if defined(__x86_64__)
static long call(long number, long a, long b, long c, long d, long e)
{
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
static long call(long number, long a, long b, long c, long d, long e)
{
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c,
                  x3 __asm__("x3") = d, x4 __asm__("x4") = e;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
    return x0;
}
#endif

static int answer(long result)
{
    if (result >= 0)
        return (int)result;
    *__errno_location() = (int)-result;
    return -1;
}

int statx(int directory, const char *restrict path, int flags, unsigned mask, struct statx *restrict status)
{
    return answer(call(SYS_statx, directory, (long)path, flags & ~AT_NO_AUTOMOUNT, mask, (long)status));
}

int fstatat(int directory, const char *restrict path, struct stat *restrict status, int flags)
{
    return answer(call(SYS_newfstatat, directory, (long)path, (long)status, flags & ~AT_NO_AUTOMOUNT, 0));
}

int fstatat64(int directory, const char *restrict path, struct stat64 *restrict status, int flags)
{
    return answer(call(SYS_newfstatat, directory, (long)path, (long)status, flags & ~AT_NO_AUTOMOUNT, 0));
}
