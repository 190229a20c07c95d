# The cuda backend as a module: kernels/cuda compiled by nvcc for the architectures that differ and that this toolkit
# knows, and as PTX of the newest for what comes later. The driver library is never linked: the runtime finds it.
enable_language(CUDA)
find_package(CUDAToolkit 13 REQUIRED)

if(NOT MTP_CUDA_ARCHITECTURES)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE known OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(chosen "")
  foreach(arch 80 90 100 120)
    if(known MATCHES "sm_${arch}(\n|$)")
      list(APPEND chosen ${arch})
    endif()
  endforeach()
  list(GET chosen -1 newest)
  list(TRANSFORM chosen APPEND "-real")
  list(APPEND chosen ${newest}-virtual)
  set(MTP_CUDA_ARCHITECTURES "${chosen}" CACHE STRING "What to compile CUDA kernels for, as CMAKE_CUDA_ARCHITECTURES; \"native\" for the device here")
endif()

file(GLOB sources CONFIGURE_DEPENDS cuda/*.cu)
add_library(mtp_cuda MODULE ${sources} check.c check_args.c ${CMAKE_SOURCE_DIR}/lib/base/tensor.c)
target_include_directories(mtp_cuda PRIVATE ${CMAKE_SOURCE_DIR}/lib/include ${CMAKE_SOURCE_DIR}/lib ${CMAKE_SOURCE_DIR}/kernels)
target_compile_definitions(mtp_cuda PRIVATE MTP__VERSION="${PROJECT_VERSION}")
target_link_libraries(mtp_cuda PRIVATE CUDA::cublasLt CUDA::cudart_static)
target_link_options(mtp_cuda PRIVATE LINKER:--version-script=${CMAKE_CURRENT_LIST_DIR}/module.map LINKER:--no-undefined)
# -Wpedantic and -Wconversion do not apply: nvcc's own code between ours is full of both
target_compile_options(mtp_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra -Xptxas=-v
  $<$<BOOL:${MTP_WERROR}>:-Werror=all-warnings -Xcompiler=-Werror>>)
set_target_properties(mtp_cuda PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_ARCHITECTURES "${MTP_CUDA_ARCHITECTURES}"
  OUTPUT_NAME mtp_cuda LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
install(TARGETS mtp_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
