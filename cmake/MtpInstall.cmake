# cmake --install: headers, both libraries, pkg-config file, CMake package. The package is relocatable.
include(CMakePackageConfigHelpers)

install(DIRECTORY ${CMAKE_SOURCE_DIR}/lib/include/mtp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

# Two export sets: whoever links the shared library needs none of our dependencies.
set(mtp_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mtp)
set_target_properties(mtp_shared PROPERTIES EXPORT_NAME mtp)
install(TARGETS mtp_shared EXPORT mtp_shared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS mtp_static EXPORT mtp_static ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT mtp_shared NAMESPACE mtp:: DESTINATION ${mtp_package_dir})
install(EXPORT mtp_static NAMESPACE mtp:: DESTINATION ${mtp_package_dir})
configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/mtp-config.cmake.in ${CMAKE_BINARY_DIR}/mtp-config.cmake
  INSTALL_DESTINATION ${mtp_package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/mtp-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/mtp-config.cmake ${CMAKE_BINARY_DIR}/mtp-config-version.cmake
  DESTINATION ${mtp_package_dir})

# mtp.pc names the private libraries for `pkg-config --static`. The OpenMP runtime and the BLAS must be those that the
# objects were compiled for, so they are named by file, except where the linker finds that file by itself.
set(mtp_pc_private "")
foreach(name IN LISTS OpenMP_C_LIB_NAMES)
  list(APPEND mtp_pc_private ${OpenMP_${name}_LIBRARY})
endforeach()
list(APPEND mtp_pc_private ${BLAS_LIBRARIES})
if(MTP_GLOO)
  list(APPEND mtp_pc_private ${MTP_GLOO_LIBRARY})
endif()
list(TRANSFORM mtp_pc_private REPLACE "^-l" "")
set(mtp_pc_libs "")
foreach(item IN LISTS mtp_pc_private)
  get_filename_component(directory "${item}" DIRECTORY)
  if(directory STREQUAL "")
    list(APPEND mtp_pc_libs -l${item})
  elseif(directory IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES AND item MATCHES "/lib([^/]+)\\.(so|a)$")
    list(APPEND mtp_pc_libs -l${CMAKE_MATCH_1})
  else()
    list(APPEND mtp_pc_libs ${item})
  endif()
endforeach()
list(APPEND mtp_pc_libs -pthread -lstdc++ -lm)
list(REMOVE_DUPLICATES mtp_pc_libs)
list(JOIN mtp_pc_libs " " mtp_pc_libs)
file(RELATIVE_PATH mtp_pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" mtp_pc_prefix ${mtp_pc_prefix})
configure_file(${CMAKE_SOURCE_DIR}/cmake/mtp.pc.in ${CMAKE_BINARY_DIR}/mtp.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/mtp.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
