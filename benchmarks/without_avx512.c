/* Hides AVX-512 and AMX from a process, whatever its libraries ask: the feature bits of CPUID's leaf 7 are without them.
 *
 *     gcc -O2 -shared -fPIC -o without_avx512.so benchmarks/without_avx512.c
 *     LD_PRELOAD=$PWD/without_avx512.so HF_PAGED_ISA=avx2 python benchmarks/throughput.py ...
 *
 * hf_paged reads /proc/cpuinfo, so it needs HF_PAGED_ISA too. Its kernels must have been compiled before, because
 * compilers handle SIGSEGV themselves. For Linux on x86-64 CPUs whose CPUID can fault (`cpuid_fault` in /proc/cpuinfo).
 * Threads and children inherit the setting; exec resets it, and loads this library again. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    (void)info;
    if (code[0] != 0x0f || code[1] != 0xa2) { /* not CPUID: a real fault */
        signal(number, SIG_DFL);
        return;
    }
    const unsigned leaf = (unsigned)registers[REG_RAX], part = (unsigned)registers[REG_RCX];
    unsigned a, b, c, d;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __cpuid_count(leaf, part, a, b, c, d);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    if (leaf == 7 && part == 0) { /* F, DQ, IFMA, PF, ER, CD, BW, VL; VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; ..., AMX */
        b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
        c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));
        d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25));
    }
    if (leaf == 7 && part == 1) a &= ~(BIT(5) | BIT(21)); /* AVX512_BF16, AMX_FP16 */
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void hide(void) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        fputs("without_avx512: this CPU or kernel cannot hide features\n", stderr);
        abort();
    }
}
