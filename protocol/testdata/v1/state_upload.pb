*½
=
/application/vnd.gpuaas.trust-bundle.v1+protobuf
k1>
0application/vnd.gpuaas.desired-state.v1+protobuf
k1"7
)application/vnd.gpuaas.leases.v1+protobuf
k1(