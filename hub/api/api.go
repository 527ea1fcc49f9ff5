// Package api holds the contract: openapi.yaml for REST, asyncapi.yaml for events. It owns no behaviour; httpapi checks
// every request against it and serves it.
package api

import _ "embed"

//go:generate go run github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen@v2.8.2 -config server.codegen.yaml openapi.yaml
//go:generate go run github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen@v2.8.2 -config client.codegen.yaml openapi.yaml
//go:generate go run github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen@v2.8.2 -config types.codegen.yaml openapi.yaml

// The packages have a comment of their own: the generator's goes, and its mark no longer touches the package clause.
//go:generate sed -i -e 1,2d -e "3s|$|\\n|" ../internal/httpapi/api.gen.go ../../pkg/client/client.gen.go ../../pkg/client/types.gen.go

//go:generate go run ../../deploy/pythonsdk api openapi.yaml ../../pkg/client/python/gpuaas/api_gen.py

// OpenAPI is openapi.yaml as written.
//
//go:embed openapi.yaml
var OpenAPI []byte

// AsyncAPI is asyncapi.yaml as written.
//
//go:embed asyncapi.yaml
var AsyncAPI []byte
