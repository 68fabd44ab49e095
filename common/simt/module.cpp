// What the CPU device knows of the module that it is linked into, from its file and the loader: where it lies, where
// its functions begin, and which thread-local variables are the kernels' shared memory.
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <map>
#include <mutex>

#include "common/simt/runtime.h"

extern "C" {
struct tls_place {
  unsigned long module, offset;
};
void* __tls_get_addr(tls_place*);
}

namespace simt {
namespace {

thread_local char tls_anchor;  // makes the module have a thread-local segment

int find_module(dl_phdr_info* info, size_t, void* raw) {
  auto& found = *static_cast<std::pair<Module, std::string>*>(raw);
  const uintptr_t own = uintptr_t(&config);
  uintptr_t low = UINTPTR_MAX, high = 0;
  size_t tls_size = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_LOAD) {
      low = std::min(low, uintptr_t(info->dlpi_addr + header.p_vaddr));
      high = std::max(high, uintptr_t(info->dlpi_addr + header.p_vaddr + header.p_memsz));
    }
    if (header.p_type == PT_TLS) tls_size = header.p_memsz;
  }
  if (own < low || own >= high) return 0;
  found.first.base = info->dlpi_addr;
  found.first.low = low, found.first.high = high;
  found.first.tls_index = info->dlpi_tls_modid, found.first.tls_size = tls_size;
  found.second = info->dlpi_name;
  return 1;
}

struct Symbols {
  std::map<uintptr_t, std::string> functions;  // address -> mangled name
  std::vector<SharedVariable> variables;
};

// _ZZ <function> E <length> <name> B6shared: a variable of a function that `__shared__` has marked. Those of libraries
// are not kernels' shared memory.
void add_variable(Symbols& symbols, const std::string& mangled, size_t offset, size_t size) {
  const size_t mark = mangled.rfind("B6shared");
  if (mangled.rfind("_ZZ", 0) != 0 || mark == std::string::npos) return;
  for (size_t e = mangled.rfind('E', mark); e != std::string::npos && e > 3; e = mangled.rfind('E', e - 1)) {
    char* name = nullptr;
    const unsigned long length = std::strtoul(mangled.c_str() + e + 1, &name, 10);
    if (length == 0 || name + length != mangled.c_str() + mark) continue;
    symbols.variables.push_back({std::string(name, length), "_Z" + mangled.substr(3, e - 3), offset, size, false});
    return;
  }
}

// Reads the module's own symbol table: functions, and thread-local variables that stand inside a function.
Symbols read_symbols(const std::string& path, uintptr_t base) {
  Symbols result;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return result;
  struct stat status;
  fstat(file, &status);
  const size_t size = size_t(status.st_size);
  void* memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (memory == MAP_FAILED) return result;
  const char* bytes = static_cast<const char*>(memory);
  const auto* elf = reinterpret_cast<const ElfW(Ehdr)*>(bytes);
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(bytes + elf->e_shoff);
  for (int s = 0; s < elf->e_shnum; ++s) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(bytes + sections[s].sh_offset);
    const char* names = bytes + sections[sections[s].sh_link].sh_offset;
    for (size_t i = 0; i < sections[s].sh_size / sizeof(ElfW(Sym)); ++i) {
      const std::string name = names + symbols[i].st_name;
      const int type = symbols[i].st_info & 0xf;
      if (symbols[i].st_shndx == SHN_UNDEF) continue;
      if (type == STT_FUNC) result.functions.emplace(base + symbols[i].st_value, name);
      if (type == STT_TLS) add_variable(result, name, symbols[i].st_value, symbols[i].st_size);
    }
  }
  munmap(memory, size);
  return result;
}

struct Loaded {
  Module module;
  Symbols symbols;
};

const Loaded& loaded() {
  static const Loaded result = [] {
    tls_anchor = 0;
    std::pair<Module, std::string> found;
    dl_iterate_phdr(find_module, &found);
    Loaded all{found.first, read_symbols(found.second.empty() ? "/proc/self/exe" : found.second, found.first.base)};
    all.module.shared = all.symbols.variables;
    return all;
  }();
  return result;
}

}  // namespace

const Module& module() { return loaded().module; }

char* thread_local_segment() {
  tls_anchor = 0;
  tls_place place{module().tls_index, 0};
  return static_cast<char*>(__tls_get_addr(&place));
}

uintptr_t function_at(uintptr_t pc) {
  const auto& functions = loaded().symbols.functions;
  const auto next = functions.upper_bound(pc);
  return next == functions.begin() || pc >= module().high ? 0 : std::prev(next)->first;
}

bool is_device_function(uintptr_t pc) {
  const auto function = loaded().symbols.functions.find(function_at(pc));
  if (function == loaded().symbols.functions.end()) return false;
  const std::string& name = function->second;
  return name.find("4simt") == std::string::npos && name.rfind("__tsan", 0) != 0 && name.rfind("simt_", 0) != 0;
}

namespace {
std::vector<const void*>& kernels() {
  static std::vector<const void*> all;
  return all;
}
}  // namespace

bool register_kernel(const void* entry) {
  kernels().push_back(entry);
  return true;
}

const std::vector<SharedVariable>& shared_variables_of(const void* entry) {
  static std::mutex mutex;
  static std::map<const void*, std::vector<SharedVariable>> known;
  std::lock_guard lock(mutex);
  auto [result, fresh] = known.try_emplace(entry);
  if (fresh) {
    const Symbols& symbols = loaded().symbols;
    result->second = symbols.variables;
    for (auto& variable : result->second) variable.owned = true;
    for (const void* other : kernels()) {
      const auto name = symbols.functions.find(uintptr_t(other));
      if (other == entry || name == symbols.functions.end()) continue;
      for (auto& variable : result->second) variable.owned &= variable.kernel != name->second;
    }
  }
  return result->second;
}

}  // namespace simt
