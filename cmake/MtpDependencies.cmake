# Finds every library the build needs; nothing is downloaded. Each has its reason in the README's dependency table.
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS C)
find_package(PkgConfig REQUIRED)

# OpenBLAS unless the user names another vendor (-DBLA_VENDOR=Intel10_64lp, FLAME, AOCL_mt, ...).
if(NOT BLA_VENDOR)
  set(BLA_VENDOR OpenBLAS)
endif()
find_package(BLAS REQUIRED)
find_path(MTP_CBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES openblas openblas-pthread mkl blis)
if(NOT MTP_CBLAS_INCLUDE_DIR)
  message(FATAL_ERROR "cblas.h not found; on Debian: apt-get install libopenblas-dev")
endif()

pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)

# What can be left out: MTP_PARTS are the libraries, MTP_PART_DEFINITIONS say to the code which are there.
set(MTP_PARTS "")
set(MTP_PART_DEFINITIONS "")

# toml++: Debian's shared library, not the header-only form (compile time).
if(MTP_TOML)
  pkg_check_modules(TOMLPLUSPLUS IMPORTED_TARGET tomlplusplus)
  if(NOT TOMLPLUSPLUS_FOUND)
    message(FATAL_ERROR "toml++ not found; on Debian: apt-get install libtomlplusplus-dev; without it: -DMTP_TOML=OFF")
  endif()
  list(APPEND MTP_PARTS PkgConfig::TOMLPLUSPLUS)
  list(APPEND MTP_PART_DEFINITIONS MTP__TOMLPLUSPLUS=1)
endif()

# The packed store: HDF5's C library, the serial one where a system has several.
if(MTP_HDF5)
  pkg_search_module(HDF5 IMPORTED_TARGET hdf5-serial hdf5)
  if(NOT HDF5_FOUND)
    message(FATAL_ERROR "HDF5 not found; on Debian: apt-get install libhdf5-dev; without it: -DMTP_HDF5=OFF")
  endif()
  list(APPEND MTP_PARTS PkgConfig::HDF5)
  list(APPEND MTP_PART_DEFINITIONS MTP__HDF5=1)
endif()

# Gloo, for more than one CPU process. Debian has no pkg-config file for it, and its CMake package also wants CUDA's.
if(MTP_GLOO)
  find_path(MTP_GLOO_INCLUDE_DIR gloo/rendezvous/store.h)
  find_library(MTP_GLOO_LIBRARY gloo)
  if(NOT MTP_GLOO_INCLUDE_DIR OR NOT MTP_GLOO_LIBRARY)
    message(FATAL_ERROR "Gloo not found; on Debian: apt-get install libgloo-dev; without it: -DMTP_GLOO=OFF")
  endif()
  add_library(mtp_gloo INTERFACE)
  target_include_directories(mtp_gloo SYSTEM INTERFACE ${MTP_GLOO_INCLUDE_DIR})
  target_compile_definitions(mtp_gloo INTERFACE MTP__GLOO=1)
else()
  set(MTP_GLOO_LIBRARY "") # hides a cached one
endif()
