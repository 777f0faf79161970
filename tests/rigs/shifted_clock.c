/* A wall clock that is CLOCK_SHIFT seconds off, for the programs that preload this; other clocks stay right.

   A wait until a moment of the wall clock is shifted back, as the kernel's clock is the right one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift;

__attribute__((constructor)) static void read_shift(void) {
  const char *seconds = getenv("CLOCK_SHIFT");
  if (seconds) shift = atol(seconds);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = (int)syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift;
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec read;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &read);
  now->tv_sec = read.tv_sec;
  now->tv_usec = read.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *copy) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (copy) *copy = now.tv_sec;
  return now.tv_sec;
}

/* Moments after 2001 are of the wall clock: no machine has been up for so long. */
static struct timespec shifted_back(const struct timespec *until) {
  struct timespec kernels = *until;
  if (kernels.tv_sec > 1000000000) kernels.tv_sec -= shift;
  return kernels;
}

static void *libc(const char *name) {
  /* dlsym alone may find the variant of a 20 years older interface. */
  void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
  return found ? found : dlsym(RTLD_NEXT, name);
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!real) real = libc("pthread_cond_timedwait");
  struct timespec kernels = shifted_back(until);
  return real(cond, mutex, &kernels);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
  static int (*real)(sem_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec kernels = shifted_back(until);
  return real(sem, &kernels);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
  static int (*real)(pthread_mutex_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  struct timespec kernels = shifted_back(until);
  return real(mutex, &kernels);
}
