/* The event loop: descriptors, timers, and children that have ended.
 *
 * Owns epoll, the clock, SIGCHLD. Not here: what a descriptor carries and what a child was for.
 *
 * Edge-triggered, because back-pressure then costs nothing: a source that is not read for now stays flagged as
 * readable, and no event comes for it again until it has been read empty. Signals are unblocked only while waiting
 * (epoll_pwait): this has no race and needs no signalfd, which early gVisor lacks.
 */
#define _GNU_SOURCE
#include "loop.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS_PER_ROUND = 64 };

static int epoll_fd = -1;
static volatile sig_atomic_t child_signalled;
static sigset_t waiting_mask;
static struct task *tasks, **tasks_tail = &tasks;
static struct timer *timers;

struct garbage {
    struct garbage *next;
};
static struct garbage *garbage;

/* The kernel's data for a source is an index into this table and the entry's generation: gVisor that was restored from
 * disk has been seen to report a socket that was closed, and removed from the epoll set, before it was saved. */
struct place {
    struct source *source; /* NULL: free */
    uint32_t taken;
    uint32_t next_free;
};
static struct place *places;
static uint32_t place_count, first_free; /* the first place stays unused: 0 means none */

static int64_t clock_us(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

int64_t now_us(void)
{
    return clock_us(CLOCK_MONOTONIC);
}

int64_t unix_time_us(void)
{
    return clock_us(CLOCK_REALTIME);
}

static void on_child(int signal)
{
    (void)signal;
    child_signalled = 1;
}

void loop_start(void)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0)
        _exit(71);
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    sigemptyset(&waiting_mask);
    struct sigaction action = {.sa_handler = on_child, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGCHLD, &action, NULL);
    child_signalled = 1;
}

void loop_forget_after_fork(void)
{
    struct sigaction action = {.sa_handler = SIG_DFL};
    sigaction(SIGCHLD, &action, NULL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static int more_places(void)
{
    uint32_t count = place_count ? 2 * place_count : 64;
    struct place *more = realloc(places, count * sizeof *more);
    if (!more)
        return ENOMEM;
    places = more;
    for (uint32_t i = count - 1; i >= place_count && i > 0; i--) {
        places[i] = (struct place){.next_free = first_free};
        first_free = i;
    }
    place_count = count;
    return 0;
}

static int take_place(struct source *source)
{
    int error = first_free ? 0 : more_places();
    if (error)
        return error;
    struct place *place = &places[source->place = first_free];
    first_free = place->next_free;
    place->source = source;
    place->taken++;
    return 0;
}

static void leave_place(struct source *source)
{
    if (!source->place)
        return;
    places[source->place].source = NULL;
    places[source->place].next_free = first_free;
    first_free = source->place;
    source->place = 0;
}

/* The source of an event. NULL: it was removed. */
static struct source *named(uint64_t name)
{
    const struct place *place = &places[(uint32_t)name < place_count ? (uint32_t)name : 0];
    return place->taken == name >> 32 ? place->source : NULL;
}

static int watch(struct source *source)
{
    struct epoll_event event = {
        .events = EPOLLIN | (source->reads_only ? 0 : EPOLLOUT) | EPOLLRDHUP | EPOLLET,
        .data.u64 = (uint64_t)places[source->place].taken << 32 | source->place,
    };
    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, source->fd, &event) < 0 ? errno : 0;
}

static int add(struct source *source, int flags)
{
    if (fcntl(source->fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return errno;
    int error = take_place(source);
    if (!error && (error = watch(source)))
        leave_place(source);
    return error;
}

int loop_add(struct source *source, int fd, void (*wake)(struct source *source))
{
    *source = (struct source){.fd = fd, .wake = wake};
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 ? errno : add(source, flags);
}

int loop_add_reader(struct source *source, int fd, void (*wake)(struct source *source))
{
    *source = (struct source){.fd = fd, .wake = wake, .reads_only = true};
    return add(source, 0);
}

void loop_renew(struct source *source)
{
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
    watch(source);
    source->readable = source->writable = true;
}

void loop_remove(struct source *source)
{
    if (source->fd < 0)
        return;
    /* Explicitly: a child that was just forked may still have the file open, which would keep the epoll entry alive. */
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
    close(source->fd);
    leave_place(source);
    source->fd = -1;
    source->readable = source->writable = false;
}

void loop_soon(struct task *task)
{
    if (task->queued)
        return;
    task->queued = true;
    task->next = NULL;
    *tasks_tail = task;
    tasks_tail = &task->next;
}

void loop_not_soon(struct task *task)
{
    if (!task->queued)
        return;
    struct task **at = &tasks;
    while (*at != task)
        at = &(*at)->next;
    *at = task->next;
    if (tasks_tail == &task->next)
        tasks_tail = at;
    task->queued = false;
}

void timer_set(struct timer *timer, int after_ms, void (*fire)(struct timer *timer))
{
    timer_cancel(timer);
    timer->at_ms = now_us() / 1000 + after_ms;
    timer->fire = fire;
    timer->set = true;
    struct timer **at = &timers;
    while (*at && (*at)->at_ms <= timer->at_ms)
        at = &(*at)->next;
    timer->next = *at;
    *at = timer;
}

void timer_cancel(struct timer *timer)
{
    if (!timer->set)
        return;
    struct timer **at = &timers;
    while (*at != timer)
        at = &(*at)->next;
    *at = timer->next;
    timer->set = false;
}

void loop_free(void *memory)
{
    struct garbage *piece = memory;
    if (piece) {
        piece->next = garbage;
        garbage = piece;
    }
}

static void collect_garbage(void)
{
    while (garbage) {
        struct garbage *next = garbage->next;
        free(garbage);
        garbage = next;
    }
}

static void reap(void (*child_ended)(pid_t pid, int status))
{
    int status;
    pid_t pid;
    child_signalled = 0;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        child_ended(pid, status);
}

static void fire_timers(void)
{
    int64_t now = now_us() / 1000;
    while (timers && timers->at_ms <= now) {
        struct timer *due = timers;
        timers = due->next;
        due->set = false;
        due->fire(due);
    }
}

/* Only as many as are queued now: a task that queues itself again waits for the next round. */
static void run_tasks(void)
{
    int count = 0;
    for (struct task *task = tasks; task; task = task->next)
        count++;
    while (tasks && count-- > 0) {
        struct task *task = tasks;
        loop_not_soon(task);
        task->run(task);
    }
}

static int wait_ms(bool busy)
{
    if (busy || tasks || child_signalled)
        return 0;
    if (!timers)
        return -1;
    int64_t left = timers->at_ms - now_us() / 1000;
    return left < 0 ? 0 : left > 3600000 ? 3600000 : (int)left + 1;
}

void loop_round(bool busy, void (*child_ended)(pid_t pid, int status))
{
    struct epoll_event events[EVENTS_PER_ROUND];
    int count = epoll_pwait(epoll_fd, events, EVENTS_PER_ROUND, wait_ms(busy), &waiting_mask);
    for (int i = 0; i < count; i++) {
        struct source *source = named(events[i].data.u64);
        if (!source)
            continue;
        source->readable |= (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0;
        source->writable |= (events[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
        source->hangup |= (events[i].events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0;
        source->wake(source);
    }
    if (child_signalled)
        reap(child_ended);
    fire_timers();
    run_tasks();
    collect_garbage();
}

void *pages_alloc(size_t size)
{
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        return NULL;
    madvise(pages, size, MADV_DONTFORK);
    return pages;
}

void pages_free(void *pages, size_t size)
{
    if (pages)
        munmap(pages, size);
}
