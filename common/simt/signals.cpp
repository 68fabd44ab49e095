// What may stop a kernel from outside: a crash inside it, and the watchdog of a thread that never ends. Both make the
// fiber's worker go on in its main context, where the launch ends with an exception.
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>

#include "common/simt/runtime.h"

namespace simt {
namespace {

int watchdog_signal() { return SIGRTMIN + 5; }

uintptr_t program_counter(const ucontext_t* context) {
#if defined(__x86_64__)
  return uintptr_t(context->uc_mcontext.gregs[REG_RIP]);
#else
  return uintptr_t(context->uc_mcontext.pc);
#endif
}
uintptr_t stack_pointer_of(const ucontext_t* context) {
#if defined(__x86_64__)
  return uintptr_t(context->uc_mcontext.gregs[REG_RSP]);
#else
  return uintptr_t(context->uc_mcontext.sp);
#endif
}
void continue_at(ucontext_t* context, void (*code)(), void* sp) {
#if defined(__x86_64__)
  context->uc_mcontext.gregs[REG_RIP] = greg_t(code);
  context->uc_mcontext.gregs[REG_RSP] = greg_t(sp);
#else
  context->uc_mcontext.pc = uintptr_t(code);
  context->uc_mcontext.sp = uintptr_t(sp);
#endif
}

// Makes the interrupted fiber continue in its worker's main context instead.
void leave_fiber(Worker& worker, ucontext_t* context, int signal, uintptr_t address) {
  worker.crash_signal = signal;
  worker.crash_address = address;
  worker.crash_pc = program_counter(context);
  worker.crash_sp = stack_pointer_of(context);
  continue_at(context, simt_resume, worker.main_sp);
}

// Whose the signals were before us, the latest last. Other modules of this kind install handlers of their own over ours
// and pass on to us what is not theirs: then the next older one is asked.
struct Before {
  struct sigaction actions[16];
  int count = 0, depth = 0;
} before[32];

void on_crash(int signal, siginfo_t* info, void* raw) {
  auto* context = static_cast<ucontext_t*>(raw);
  if (Worker* worker = worker_at(stack_pointer_of(context))) {
    return leave_fiber(*worker, context, signal, uintptr_t(info->si_addr));
  }
  Before& others = before[signal];
  const int index = others.count - 1 - others.depth;
  if (index >= 0 && others.actions[index].sa_flags & SA_SIGINFO) {
    ++others.depth;
    others.actions[index].sa_sigaction(signal, info, raw);
    --others.depth;
  } else if (index >= 0 && others.actions[index].sa_handler != SIG_DFL && others.actions[index].sa_handler != SIG_IGN) {
    ++others.depth;
    others.actions[index].sa_handler(signal);
    --others.depth;
  } else {
    ::signal(signal, SIG_DFL);  // the access happens again, and ends the process as it would have without us
  }
}

// The timer brings its worker along, so that the handler of any module of this kind serves the timers of all.
void on_watchdog(int, siginfo_t* info, void* raw) {
  auto* worker = static_cast<Worker*>(info->si_value.sival_ptr);
  worker->tick(*worker, raw);
}

void tick(Worker& worker, void* raw) {
  auto* context = static_cast<ucontext_t*>(raw);
  if (worker_at(stack_pointer_of(context)) != &worker) return;
  // Threads that wait for each other in loops are told by the scheduler, which knows where.
  const uint64_t progress = worker.switches + worker.spins;
  if (worker.busy.load(std::memory_order_relaxed) || progress != worker.watched) {
    worker.watched = progress;
    return;
  }
  leave_fiber(worker, context, 0, 0);
}

bool same(const struct sigaction& a, const struct sigaction& b) { return a.sa_handler == b.sa_handler; }

}  // namespace

// A launch asks the system once whether the crash handlers are still ours; everything else was done before.
void ensure_signals() {
  struct sigaction current;
  sigaction(SIGSEGV, nullptr, &current);
  if (current.sa_flags & SA_SIGINFO && current.sa_sigaction == on_crash) return;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  struct sigaction action = {};
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) {
    sigaction(signal, &action, &current);
    if (same(current, action)) continue;
    Before& others = before[signal];
    int kept = 0;
    for (int i = 0; i < others.count; ++i) {
      if (!same(others.actions[i], current) && kept < 15) others.actions[kept++] = others.actions[i];
    }
    others.actions[kept++] = current;
    others.count = kept;
  }
  action.sa_sigaction = on_watchdog;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigaction(watchdog_signal(), &action, nullptr);
}

namespace {

// The handlers need a stack that is not the fiber's, which may be the one that overflowed. One for each OS thread.
struct SignalStack {
  std::unique_ptr<char[]> memory;
  void ensure() {
    if (memory) return;
    memory.reset(new char[SIGNAL_STACK]);
    stack_t before_us;
    sigaltstack(nullptr, &before_us);
    if (!(before_us.ss_flags & SS_DISABLE)) return;  // somebody else's serves as well
    stack_t own = {};
    own.ss_sp = memory.get();
    own.ss_size = SIGNAL_STACK;
    sigaltstack(&own, nullptr);
  }
  ~SignalStack() {
    stack_t now;
    sigaltstack(nullptr, &now);
    if (!memory || now.ss_sp != memory.get()) return;
    now.ss_flags = SS_DISABLE;
    sigaltstack(&now, nullptr);
  }
};
thread_local SignalStack signal_stack;

}  // namespace

void ensure_signal_stack() { signal_stack.ensure(); }

// A clock of the worker's own CPU time, so that a busy machine is not taken for a stuck thread. It goes on ticking
// after the launch, once in a while, which costs less than to start and stop it.
void ensure_watchdog(Worker& worker) {
  static thread_local const pid_t thread = pid_t(syscall(SYS_gettid));
  if (worker.timer_thread == thread && worker.timer_timeout == config.timeout) return;
  if (worker.timer_thread != thread) {
    if (worker.timer_thread) timer_delete(worker.timer);
    worker.tick = tick;
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = watchdog_signal();
    event.sigev_value.sival_ptr = &worker;
    event._sigev_un._tid = thread;
    worker.timer_thread = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &worker.timer) == 0 ? thread : 0;
    if (!worker.timer_thread) return;
  }
  worker.timer_timeout = config.timeout;
  const double half = std::max(config.timeout, 0.01) / 2;
  itimerspec when = {};
  when.it_value.tv_sec = when.it_interval.tv_sec = time_t(half);
  when.it_value.tv_nsec = when.it_interval.tv_nsec = long((half - double(time_t(half))) * 1e9);
  timer_settime(worker.timer, 0, &when, nullptr);
}

namespace {

// The kernel's own place, for a thread that was stopped inside the device's code or a library: the first return address
// on its stack that lies in the kernel.
uintptr_t kernel_place(const Worker& worker) {
  const auto entry = uintptr_t(worker.launch->entry);
  if (function_at(worker.crash_pc) == entry || is_device_function(worker.crash_pc)) return worker.crash_pc + 1;
  const uintptr_t end = (worker.crash_sp | (STACK_SIZE - 1)) + 1;
  for (uintptr_t word = worker.crash_sp & ~uintptr_t(7); word < end; word += 8) {
    const uintptr_t value = *reinterpret_cast<const uintptr_t*>(word);
    if (function_at(value) == entry) return value;
  }
  return worker.crash_pc + 1;
}

}  // namespace

std::string explain_crash(Worker& worker) {
  const std::string thread = "thread " + describe(worker.thread_index(worker.warp * 32 + worker.lane));
  const Module& m = module();
  const uintptr_t pc = kernel_place(worker);  // as if it had returned there
  const std::string place = pc >= m.low && pc < m.high ? " at " + code_place(pc) : "";
  if (worker.crash_signal == 0) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", config.timeout);
    const std::string others = who_waits(worker);
    return head(worker) + "timeout: " + thread + " ran for " + seconds + " s" + place +
           " without returning or reaching a barrier" + (others.empty() ? "" : "; " + others);
  }
  const char* const name = strsignal(worker.crash_signal);
  std::string what = name ? name : "signal";
  if (worker.crash_signal == SIGILL || worker.crash_signal == SIGTRAP) what = "an index outside its array";
  if (worker.crash_signal == SIGSEGV || worker.crash_signal == SIGBUS) {
    if (worker.crash_address - uintptr_t(worker.slab) + SLAB_GUARD < SLAB_GUARD) {
      what = "used " + too_much_local_memory();
    } else {
      const std::string where = xray_place(reinterpret_cast<void*>(worker.crash_address));
      char address[32];
      std::snprintf(address, sizeof address, "0x%zx", size_t(worker.crash_address));
      what =
          "access to memory that is not there, address " + std::string(address) + (where.empty() ? "" : ", " + where);
    }
  }
  return head(worker) + "crash: " + thread + place + ": " + what;
}

}  // namespace simt
