/* A libFuzzer harness over the request that `sudo` gets from inside (guest/sudo.c): its counts, strings and variables.
 *
 * Includes sudo.c itself, since what parses is its own. Nothing is started: the stub in the place of program.c reads all
 * that a program would be started with, and writes where program.c may. */
#define _GNU_SOURCE
#include "sudo.c"

#define CHECK(condition) \
    do { \
        if (!(condition)) \
            abort(); \
    } while (0)

const char program_path[] = "PATH=/bin";
static size_t touched;
static bool fails;

static void read_list(char **list)
{
    for (; *list; list++)
        touched += strlen(*list);
}

pid_t program_start(struct program *program, int *error, const char **about)
{
    read_list(program->argv);
    read_list(program->env);
    touched += strlen(program->file);
    program->argv[-1] = "sh"; /* as execute() does for a script */
    *error = fails ? ENOENT : 0;
    *about = program->file;
    return fails ? 0 : 4711;
}

void program_close(const int *fds, size_t count)
{
    (void)fds, (void)count;
}

int users_find(const char *spec, struct account *account)
{
    touched += strlen(spec);
    *account = (struct account){.uid = 7, .gid = 7, .name = touched % 2 ? "name" : NULL, .home = "/", .shell = "/bin/sh"};
    return *spec == '!' ? ENOENT : 0;
}

void users_forget(struct account *account)
{
    *account = (struct account){0};
}

const struct rlimit *guest_first_nofile(void)
{
    static const struct rlimit limit = {9, 9};
    return &limit;
}

bool tree_contains(const struct tree *tree, pid_t pid, int depth)
{
    (void)tree, (void)pid;
    return depth > 0;
}

int64_t now_us(void)
{
    return 1;
}

char *fields_string(struct fields fields, uint16_t tag)
{
    (void)fields, (void)tag;
    return NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return -1;
    fails = *data & 1;
    struct client *client = &clients[0];
    *client = (struct client){.state = ASKING, .socket = -1, .size = size - 1, .filled = size - 1};
    CHECK(client->request = malloc(size)); /* of its size, so that a byte too far is seen */
    CHECK(client->request = realloc(client->request, size - 1 ? size - 1 : 1));
    memcpy(client->request, data + 1, size - 1);
    const char *failed = run(client);
    CHECK(!failed || strlen(failed) < FAILED_BYTES);
    if (failed)
        drop(client);
    *client = (struct client){.socket = -1};
    return 0;
}
