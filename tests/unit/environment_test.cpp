// Variables of the environment that steer a run, and what is said of them.
#include <gtest/gtest.h>

#include "octet/runtime/environment.h"

namespace octet {
namespace {

std::vector<std::string> names_of(const std::vector<std::string>& entries) {
  std::vector<std::string> names;
  for (const EnvironmentVariable& variable : steering_variables(entries)) names.push_back(variable.name);
  return names;
}

std::string cost(const std::string& entry) {
  const auto variables = steering_variables({entry});
  return variables.empty() ? "(not shown)" : variables[0].cost;
}

TEST(Environment, WhatLaunchersAndInstallationsSetIsLeftOut) {
  EXPECT_EQ(names_of({"OMPI_MCA_orte_ess_num_procs=2", "OMPI_MCA_ess=^singleton",
                      "OMPI_MCA_pmix=^s1,s2,cray,isolated", "OMPI_MCA_ess_base_vpid=0",
                      "OMPI_MCA_shmem_RUNTIME_QUERY_hint=mmap", "OMPI_MCA_initial_wdir=/",
                      "OMPI_MCA_mpi_oversubscribe=0", "OMPI_COMM_WORLD_RANK=0",
                      "OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_hwloc_base_binding_policy=none",
                      "PMIX_RANK=0", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_MCA_mpi_yield_when_idle=1",
                      "CUDA_HOME=/usr/local/cuda", "NCCL_VERSION=2.28.9", "PATH=/bin", "novalue"}),
            std::vector<std::string>{});
}

TEST(Environment, WhatAUserSetIsShownInTheOrderOfNames) {
  EXPECT_EQ(names_of({"UCX_TLS=rc", "NCCL_SOCKET_IFNAME==eth0", "OMPI_MCA_btl=self,vader",
                      "OMPI_MCA_mpi_yield_when_idle=0", "CUDA_VISIBLE_DEVICES=0,1"}),
            (std::vector<std::string>{"CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl",
                                      "OMPI_MCA_mpi_yield_when_idle", "UCX_TLS"}));
  EXPECT_EQ(steering_variables({"NCCL_SOCKET_IFNAME==eth0"})[0].value, "=eth0");
}

TEST(Environment, SettingsForDebuggingHaveACostUnlessTheyAreOff) {
  for (const char* entry :
       {"NCCL_DEBUG=INFO", "NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_IB_DISABLE=1", "NCCL_ALGO=Ring",
        "NCCL_PROTO=Simple", "CUDA_LAUNCH_BLOCKING=1", "CUDA_DEVICE_MAX_CONNECTIONS=1", "NCCL_P2P_LEVEL=0"}) {
    EXPECT_NE(cost(entry), "") << entry;
    EXPECT_NE(cost(entry), "(not shown)") << entry;
  }
  for (const char* entry : {"NCCL_DEBUG=WARN", "NCCL_P2P_DISABLE=0", "CUDA_LAUNCH_BLOCKING=0", "NCCL_ALGO=",
                            "CUDA_DEVICE_MAX_CONNECTIONS=32", "NCCL_IB_HCA=mlx5", "OMPI_MCA_btl=self"}) {
    EXPECT_EQ(cost(entry), "") << entry;
  }
}

TEST(Environment, RanksThatDisagreeAreNamed) {
  const auto plain = steering_variables({"NCCL_IB_HCA=mlx5_0", "CUDA_VISIBLE_DEVICES=0"});
  const auto ring = steering_variables({"NCCL_IB_HCA=mlx5_0", "CUDA_VISIBLE_DEVICES=1", "NCCL_ALGO=Ring"});
  EXPECT_EQ(environment_report({{}, {}}), "");
  EXPECT_EQ(environment_report({plain, plain}), "  environment CUDA_VISIBLE_DEVICES=0 NCCL_IB_HCA=mlx5_0");
  const std::string report = environment_report({plain, plain, ring, plain});
  EXPECT_NE(report.find("warning: ranks differ in NCCL_ALGO: Ring on rank 2; not set on ranks 0-1,3"),
            std::string::npos)
      << report;
  EXPECT_NE(report.find("warning: NCCL_ALGO=Ring: NCCL may not choose"), std::string::npos) << report;
  EXPECT_EQ(report.find("differ in CUDA_VISIBLE_DEVICES"), std::string::npos) << report;
  EXPECT_EQ(report.find("differ in NCCL_IB_HCA"), std::string::npos) << report;
}

}  // namespace
}  // namespace octet
