// Delays what a process writes to some files, preloaded by LD_PRELOAD; the application knows nothing.
//
// FAULTS_SLOW_PATH        part of the paths of these files
// FAULTS_SLOW_BYTES       are written at once, of larger writes the first so many (a short write)
// FAULTS_SLOW_MICROSECONDS  each of these takes
// FAULTS_STILL            a file; while it is there, such a write waits for ever
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static size_t delayed(int file, size_t count) {
  const char *wanted = getenv("FAULTS_SLOW_PATH");
  const char *bytes = getenv("FAULTS_SLOW_BYTES"), *pause = getenv("FAULTS_SLOW_MICROSECONDS");
  const char *still = getenv("FAULTS_STILL");
  if (!wanted || !bytes || !pause || file < 3) return count;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return count;
  path[length] = 0;
  if (!strstr(path, wanted)) return count;
  while (still && access(still, F_OK) == 0) usleep(50000);
  size_t most = strtoul(bytes, NULL, 10);
  usleep(strtoul(pause, NULL, 10));
  return count < most ? count : most;
}

ssize_t write(int file, const void *data, size_t count) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) real = dlsym(RTLD_NEXT, "write");
  return real(file, data, delayed(file, count));
}

ssize_t pwrite(int file, const void *data, size_t count, off_t offset) {
  static ssize_t (*real)(int, const void *, size_t, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "pwrite");
  return real(file, data, delayed(file, count), offset);
}

ssize_t pwrite64(int file, const void *data, size_t count, off64_t offset) {
  static ssize_t (*real)(int, const void *, size_t, off64_t);
  if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
  return real(file, data, delayed(file, count), offset);
}

// As one write of the first part: a short write is the caller's to continue.
ssize_t writev(int file, const struct iovec *parts, int count) {
  static ssize_t (*real)(int, const struct iovec *, int);
  if (!real) real = dlsym(RTLD_NEXT, "writev");
  for (int i = 0; i < count; i++) {
    if (!parts[i].iov_len) continue;
    size_t allowed = delayed(file, parts[i].iov_len);
    if (allowed < parts[i].iov_len) return write(file, parts[i].iov_base, allowed);
    break;
  }
  return real(file, parts, count);
}
