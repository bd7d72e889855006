/* Users of the sandbox: resolving a name, and changing to that user.
 *
 * Owns /etc/passwd, /etc/group, set*id. Not here: what is done as that user. Both files are parsed here, because the C
 * library's lookup loads NSS modules of the image, and the image is hostile.
 */
#define _GNU_SOURCE
#include "users.h"
#include "walk.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_DATABASE_BYTES = 4 << 20, MAX_GROUPS = 256, MAX_EXTRA_USERS = 8 };

static const char *extra_users[MAX_EXTRA_USERS];
static int extra_user_count;

/* Splits in place at ':'; missing fields are empty. */
static void split(char *line, char **parts, int count)
{
    for (int i = 0; i < count; i++) {
        parts[i] = line;
        char *colon = i + 1 < count ? strchr(line, ':') : NULL;
        if (colon)
            *colon++ = 0;
        line = colon ? colon : line + strlen(line);
    }
}

static bool parse_id(const char *text, uint32_t *id)
{
    uint64_t value = 0;
    if (!*text)
        return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || value > UINT32_MAX)
            return false;
        value = value * 10 + (uint64_t)(*text - '0');
    }
    *id = (uint32_t)value;
    return value < UINT32_MAX; /* UINT32_MAX means "no change" to the kernel */
}

/* The content of a small file; NULL when there is none. Never blocks on a pipe in its place. */
static char *slurp(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat status;
    if (fd < 0)
        return NULL;
    char *text = NULL;
    size_t size = 0;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size <= MAX_DATABASE_BYTES &&
        (text = malloc((size_t)status.st_size + 1))) {
        ssize_t count;
        while (size < (size_t)status.st_size && (count = read(fd, text + size, (size_t)status.st_size - size)) > 0)
            size += (size_t)count;
        text[size] = 0;
    }
    close(fd);
    return text;
}

bool users_add(const char *definition)
{
    char *copy = strdup(definition), *parts[4];
    uint32_t uid, gid;
    if (!copy || extra_user_count == MAX_EXTRA_USERS)
        return false;
    split(copy, parts, 4);
    bool good = *parts[0] && parse_id(parts[1], &uid) && parse_id(parts[2], &gid) && *parts[3] == '/';
    if (good)
        extra_users[extra_user_count++] = definition;
    free(copy);
    return good;
}

bool users_make_home(const char *definition)
{
    char *copy = strdup(definition), *parts[3];
    uint32_t uid, gid;
    if (!copy)
        return false;
    split(copy, parts, 3);
    char *path = parts[2];
    bool good = parse_id(parts[0], &uid) && parse_id(parts[1], &gid) && *path == '/';
    if (good) {
        for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
            *slash = 0;
            mkdir(path, 0755);
            *slash = '/';
        }
        mkdir(path, 0755);
        /* Not through a symlink: the content of a sandbox that slept was written by untrusted code. */
        int fd = walk_open(AT_FDCWD, path);
        struct stat status;
        if (fd >= 0) {
            if (fstat(fd, &status) == 0 && (status.st_uid != uid || status.st_gid != gid))
                (void)!fchown(fd, uid, gid);
            close(fd);
        }
    }
    free(copy);
    return good;
}

struct wanted {
    const char *name;
    bool by_id;
    uint32_t uid;
};

/* parts: name, uid, gid, home, shell */
static bool take_entry(const struct wanted *wanted, char **parts, struct account *account)
{
    uint32_t uid, gid;
    if (!parse_id(parts[1], &uid) || !parse_id(parts[2], &gid))
        return false;
    if (wanted->by_id ? uid != wanted->uid : strcmp(parts[0], wanted->name))
        return false;
    account->uid = uid;
    account->gid = gid;
    account->name = parts[0];
    account->home = *parts[3] ? parts[3] : "/";
    account->shell = *parts[4] ? parts[4] : "/bin/sh";
    return true;
}

static bool find_in_passwd(const struct wanted *wanted, struct account *account)
{
    char *text = slurp("/etc/passwd"), *rest = text, *line, *fields[7];
    while (rest && (line = strsep(&rest, "\n"))) {
        split(line, fields, 7);
        char *parts[] = {fields[0], fields[2], fields[3], fields[5], fields[6]};
        if (take_entry(wanted, parts, account)) {
            account->text = text;
            return true;
        }
    }
    free(text);
    return false;
}

static bool find_in_extra(const struct wanted *wanted, struct account *account)
{
    for (int i = 0; i < extra_user_count; i++) {
        char *copy = strdup(extra_users[i]), *parts[5];
        if (!copy)
            return false;
        split(copy, parts, 4);
        parts[4] = "";
        if (take_entry(wanted, parts, account)) {
            account->text = copy;
            return true;
        }
        free(copy);
    }
    return false;
}

static bool is_member(char *members, const char *name)
{
    char *member;
    while ((member = strsep(&members, ",")))
        if (!strcmp(member, name))
            return true;
    return false;
}

static void find_groups(struct account *account)
{
    account->groups = malloc(MAX_GROUPS * sizeof *account->groups);
    if (!account->groups)
        return;
    account->groups[account->group_count++] = account->gid;
    char *text = account->name ? slurp("/etc/group") : NULL, *rest = text, *line, *parts[4];
    while (rest && (line = strsep(&rest, "\n")) && account->group_count < MAX_GROUPS) {
        uint32_t gid;
        split(line, parts, 4);
        if (parse_id(parts[2], &gid) && gid != account->gid && is_member(parts[3], account->name))
            account->groups[account->group_count++] = gid;
    }
    free(text);
}

static int find_group(const char *group, uint32_t *gid)
{
    if (parse_id(group, gid))
        return 0;
    char *text = slurp("/etc/group"), *rest = text, *line, *parts[4];
    bool found = false;
    while (!found && rest && (line = strsep(&rest, "\n"))) {
        split(line, parts, 4);
        found = !strcmp(parts[0], group) && parse_id(parts[2], gid);
    }
    free(text);
    return found ? 0 : ENOENT;
}

/* `user`: a name or an id, NULL for root. `group`: likewise, NULL for the user's own. */
static int find_account(const char *user, const char *group, struct account *account)
{
    struct wanted wanted = {.name = user, .by_id = !user};
    uint32_t gid = 0;
    if (user)
        wanted.by_id = parse_id(user, &wanted.uid);
    if (group) {
        int error = *group ? find_group(group, &gid) : EINVAL;
        if (error)
            return error;
    }
    /* Where only one id is mapped, the host makes a name an alias of root, whatever the image says. */
    bool all_one = !wanted.by_id && find_in_extra(&wanted, account) && account->uid == 0;
    if (!all_one) {
        free(account->text);
        account->text = NULL;
    }
    if (!all_one && !find_in_passwd(&wanted, account) && !find_in_extra(&wanted, account)) {
        if (!wanted.by_id)
            return ENOENT;
        /* A number needs no entry. Without one the group is 0, as in OCI runtimes and Docker. */
        *account = (struct account){.uid = wanted.uid, .home = wanted.uid ? "/" : "/root", .shell = "/bin/sh"};
        if (!wanted.uid)
            account->name = "root";
    }
    if (group)
        account->gid = gid;
    return 0;
}

int users_find(const char *spec, struct account *account)
{
    *account = (struct account){0};
    char *copy = spec ? strdup(spec) : NULL, *group = NULL;
    if (spec && !copy)
        return ENOMEM;
    if (copy && (group = strchr(copy, ':')))
        *group++ = 0;
    int error = find_account(copy, group, account);
    free(copy);
    if (!error)
        find_groups(account);
    return error;
}

void users_forget(struct account *account)
{
    free(account->groups);
    free(account->text);
    *account = (struct account){0};
}

/* In a user namespace made without privilege, setgroups is denied and there are no groups to drop. */
static bool setgroups_is_denied(void)
{
    char word[4] = "";
    int fd = open("/proc/self/setgroups", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t count = read(fd, word, sizeof word);
    close(fd);
    return count == 4 && !memcmp(word, "deny", 4);
}

int users_become(const struct account *account)
{
    /* Not the C library's wrappers: they signal threads, which a vfork()ed child must not do. */
    if (syscall(SYS_setgroups, (size_t)account->group_count, account->groups) < 0 &&
        !(errno == EPERM && setgroups_is_denied()))
        return errno;
    if (syscall(SYS_setresgid, account->gid, account->gid, account->gid) < 0)
        return errno;
    if (syscall(SYS_setresuid, account->uid, account->uid, account->uid) < 0)
        return errno;
    /* A change of user may make a process dumpable and thus traceable (fs.suid_dumpable): reset it. */
    prctl(PR_SET_DUMPABLE, 0);
    return 0;
}
