package appkit

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeCAUnreadable: the CA file holds no certificate.
	codeCAUnreadable fault.Code = "ca_unreadable"
	// codeKeyExists: the key file exists already.
	codeKeyExists fault.Code = "key_exists"
	// codeKeyExposed: other users may read the key file.
	codeKeyExposed fault.Code = "key_exposed"
	// codeKeyUnreadable: the key file is not an Ed25519 key that can be read.
	codeKeyUnreadable fault.Code = "key_unreadable"
	// codePushFailed: the image could not be pushed.
	codePushFailed fault.Code = "push_failed"
	// codePushNotStored: the registry could not store the image.
	codePushNotStored fault.Code = "push_not_stored"
	// codePushRefused: the registry refuses the push.
	codePushRefused fault.Code = "push_refused"
	// codeTemplateValue: the manifest template and its values do not fit.
	codeTemplateValue fault.Code = "template_value"
)
