// Another processor for a process: its own CPUID faults, and a handler answers with fewer instruction sets. LD_PRELOAD.
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_CPUID_FAULTS 0x1012
static int amd, sets;  // sets: 2 AVX2, 512 AVX-512 without AMX and 16 bits, 516 with bfloat16

static void fault(int on) { syscall(SYS_arch_prctl, ARCH_CPUID_FAULTS, !on); }

static void answer(uint32_t leaf, uint32_t sub, uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d) {
  __cpuid_count(leaf, sub, *a, *b, *c, *d);
  if (leaf == 7 && sub == 0) {
    *d &= ~(1u << 22 | 1u << 23 | 1u << 24 | 1u << 25 | 1u << 8 | 1u << 2 | 1u << 3);  // AMX, FP16
    if (sets == 2) {
      *b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);
      *c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
    }
  }
  if (leaf == 7 && sub == 1) {
    *a &= sets == 516 ? 1u << 5 : 0;
    *b = *c = *d = 0;
  }
  if (!amd) return;
  if (leaf == 0) *b = 0x68747541, *d = 0x69746e65, *c = 0x444d4163, *a = 0x10;
  if (leaf == 1) *a = sets == 2 ? 0x00A20F10 : 0x00A10F11;  // Zen 3, Zen 4
  if (leaf == 2 || leaf == 4 || leaf == 0xb || leaf == 0x1f || leaf == 0x14 || leaf == 0x1d || leaf == 0x1e)
    *a = *b = *c = *d = 0;
  if (leaf == 0x80000000) *a = 0x80000028, *b = 0x68747541, *d = 0x69746e65, *c = 0x444d4163;
  if (leaf == 0x80000001) *c |= 1u << 22;  // topology extensions: 0x8000001D
  if (leaf == 0x8000001D) {
    static const uint32_t kinds[][3] = {{0x21, 8, 64}, {0x22, 8, 64}, {0x43, 8, 1024}, {0x63, 16, 32768}};
    *a = *b = *c = *d = 0;
    if (sub < 4) *a = kinds[sub][0] | (sub == 3 ? 7u << 14 : 0), *b = (kinds[sub][1] - 1) << 22 | 63, *c = kinds[sub][2] * (sub == 2 && sets > 2 ? 2 : 1) - 1;
  }
}

static int next_action(int number, const struct sigaction *new, struct sigaction *old) {
  static int (*next)(int, const struct sigaction *, struct sigaction *);
  if (!next) next = dlsym(RTLD_NEXT, "sigaction");
  return next(number, new, old);
}

static void handle(int number, siginfo_t *info, void *context) {
  greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
  const unsigned char *at = (const unsigned char *)r[REG_RIP];
  if (!(at[0] == 0x0f && at[1] == 0xa2)) {
    struct sigaction plain = {.sa_handler = SIG_DFL};
    next_action(number, &plain, NULL);
    return;
  }
  uint32_t a, b, c, d;
  fault(0);
  answer(r[REG_RAX], r[REG_RCX], &a, &b, &c, &d);
  fault(1);
  r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d;
  r[REG_RIP] += 2;
}

// Libraries that install handlers of their own would take its faults.
int sigaction(int number, const struct sigaction *new, struct sigaction *old) {
  return number == SIGSEGV && new ? 0 : next_action(number, new, old);
}

sighandler_t signal(int number, sighandler_t handler) {
  return number == SIGSEGV ? SIG_DFL : ((sighandler_t(*)(int, sighandler_t))dlsym(RTLD_NEXT, "signal"))(number, handler);
}

__attribute__((constructor)) static void begin(void) {
  const char *kind = getenv("PRETENDED_PROCESSOR");
  if (!kind) return;
  amd = !strncmp(kind, "amd", 3);
  sets = atoi(strrchr(kind, '-') + 1);
  struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER};
  next_action(SIGSEGV, &action, NULL);
  fault(1);
}
