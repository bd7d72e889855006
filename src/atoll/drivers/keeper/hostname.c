/* Sets the hostname of a running sandbox, which no process inside may do.
 *
 * The process id that is given may belong to another process by now, even of the host: only a namespace that is owned
 * by the sandbox's user id is changed. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/nsfs.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "keeper.h"

void set_hostname(unsigned owner, const char *pid, const char *hostname)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/ns/uts", pid);
    int uts = open(path, O_RDONLY | O_CLOEXEC);
    int user = uts < 0 ? -1 : ioctl(uts, NS_GET_USERNS);
    uid_t found;
    if (user < 0 || ioctl(user, NS_GET_OWNER_UID, &found) < 0)
        give_up("finding the sandbox's namespaces");
    if (found != owner) {
        errno = ESRCH;
        give_up("the process does not belong to the sandbox");
    }
    if (setns(user, CLONE_NEWUSER) < 0 || setns(uts, CLONE_NEWUTS) < 0)
        give_up("entering the sandbox's namespaces");
    if (sethostname(hostname, strlen(hostname)) < 0)
        give_up("sethostname");
}
