"""Which files the Numenta Anomaly Benchmark consists of, and what they hash to."""

HOME = "https://raw.githubusercontent.com/numenta/NAB/ea702d75cc2258d9d7dd35ca8e5e2539d71f3140"
GROUPS = ("realAWSCloudwatch", "realAdExchange", "realKnownCause", "realTraffic")
"""What ``"nab"`` alone means. The others, tweets and artificial series, are asked for by their group."""
WINDOWS = "combined_windows.json"
WINDOWS_SHA256 = "1e1fbc4601321aad8d0f8b3784c8134299379f68f6c1f7777565f8ffd57ab6b1"
SHA256 = {
    "artificialNoAnomaly": {
        "art_daily_no_noise": "ccb7743ac2de8ca110db4af796d11ba31a23ad448a28e353a935c15f637756bc",
        "art_daily_perfect_square_wave": "662ff0a295b81eb0ff8e81116a54a497cd6f6b07c19c7a5ea72cce494913ce62",
        "art_daily_small_noise": "c4b304229f69f108eaa024fb2406fcd4510c5c5d95cd0053e2da6989682e4e6d",
        "art_flatline": "1cc10761ddd6d55fb5f0d9cfc73610416abbb120ee14bb65eff288509a463397",
        "art_noisy": "ad455adeaf06852222500955f2aefe6bd389cc762ef68e7102ee543209c8607f",
    },
    "artificialWithAnomaly": {
        "art_daily_flatmiddle": "ea5df125947e9ee2b977ac3d341f3c2a029588862af97cae4a654fc56e838702",
        "art_daily_jumpsdown": "4af31802e87dff4b4ba3ceb21714ba9d905f7888e1f53d47cc6dd4f856f9debc",
        "art_daily_jumpsup": "f79f92b93ee4f9c10e2dc552505e8880b0c618639ed5e0f9816e044b75c26456",
        "art_daily_nojump": "65c85d1834376ed5e622f01721d478609577ea0df0a067c5a5ebe5edea03b077",
        "art_increase_spike_density": "0959d8871d5c1a3fc3120fb7421e4ef113fffb434af2889085b52aebdb69360c",
        "art_load_balancer_spikes": "99f7130e54c7c3e818df8e3bdc0974cd241914bb14a10a9c3fa7c1374125d224",
    },
    "realAWSCloudwatch": {
        "ec2_cpu_utilization_24ae8d": "ab446fbd8b9f37507eb2fdb06315826d8daeef02e241133ce06e0ee571ba53d9",
        "ec2_cpu_utilization_53ea38": "8942e498de7b40f1b4a6d802755592c09b8fb73ce8f658763a09cb9ea1ea94ac",
        "ec2_cpu_utilization_5f5533": "01613e6f632d067f11a5dfd40a188b0789752b388d9bc77a398bd06333878a76",
        "ec2_cpu_utilization_77c1ca": "90ceabd570b449241ee24ff8a116a793979b7671ce4490707311bfea0e0aae1f",
        "ec2_cpu_utilization_825cc2": "d768419037c9db269343822957314f57ee21a7d9a4d41df2add0d1ba45ba84de",
        "ec2_cpu_utilization_ac20cd": "749a15c2e1a4543c21fee9cbf3338cd8a7ed5f5f8a1308b9b099b06c2c66e66b",
        "ec2_cpu_utilization_c6585a": "d936cea74682ed43ac96b778352d7de294c0b0c168f4a7e6817162346cdb28c1",
        "ec2_cpu_utilization_fe7f93": "f3433f8171f4dcea86c0c7af9996d0f166f812fa0f4567f1d5cd85d2d2cd69b4",
        "ec2_disk_write_bytes_1ef3de": "ce3d6c6a652ed7c31a6dd3727a36e128fcac6fb2381c63267ad0fbc02eccd9df",
        "ec2_disk_write_bytes_c0d644": "a0e734a66098bb81833835f0839dadafbc8ae829c51494670ee8849e46eb5b63",
        "ec2_network_in_257a54": "39104b08f2e0a673b5137eb7681897fcadf0955fedf565740a6a94edc63a81a4",
        "ec2_network_in_5abac7": "c27ef93f582af63bf42e80d804764cbe64ae987620f3cfab5477d6ebb3c6157e",
        "elb_request_count_8c0756": "74c26574a01ca9fb89dddb5021e2e13c3a93eb25dc640438a9acb1ceb00f1021",
        "grok_asg_anomaly": "86a0abe9d58e376858d2fd4f4a438f1997e24c64a09e5af03accd4e1b372ac47",
        "iio_us-east-1_i-a2eb1cd9_NetworkIn": "f115fbe6542159eed5612445bfa620708a28ab6b41349d1432bb15c3a3b8414d",
        "rds_cpu_utilization_cc0c53": "d5df979ef85928769a016cd0f935919d8c2a113926e21e1eb3a5001d688760e2",
        "rds_cpu_utilization_e47b3b": "6b712b922ab3b3404c5a629d64a570c390c99471ee8b9b0ff7665f553fda92c1",
    },
    "realAdExchange": {
        "exchange-2_cpc_results": "d869ab165254f3ee77ee21fd9fab2be1d07c1f80b8133cf01bbaf2d768c2ac64",
        "exchange-2_cpm_results": "1f01b9438566d2fe1ac446faa202a395ac86db9240a1955bc1f118c8eada2a19",
        "exchange-3_cpc_results": "e70b24dba107a2589657cb3feb9ca5605b4f3f7de49ff445f32f5991bc0bdbe5",
        "exchange-3_cpm_results": "74d354a94fb1730e14b469c7c1c6e99c2ad69af53afdb85f65220bd3cf01ce4a",
        "exchange-4_cpc_results": "d4c13abd6f28594dc446f22106562ebe917fdbe76170f60a500c2a402ecc09e2",
        "exchange-4_cpm_results": "4e5c955b632145b77b93fba4a5e3bf615d47e00416e17091d64e05ae109c760e",
    },
    "realKnownCause": {
        "ambient_temperature_system_failure": "230b68ccca20f59d562afd5d24ad52939c9b784386bed0054018358bf9120581",
        "cpu_utilization_asg_misconfiguration": "58ba65dc0737cfbac11b51514476d50c438d44011232144bb8d93f392df58f9f",
        "ec2_request_latency_system_failure": "98378580aa80157e057c61d59d81daddccc6c65a2c0c800e3f01f603b8215c3f",
        "machine_temperature_system_failure": "92bf5b87fc7f9bba8ca0b7ec63ccaac8cb4a1371a258e8c29a10ae9c018d82a4",
        "nyc_taxi": "d8fa6f7f0734bf5c8be12c52a94e20a82664c397d9dec4449156bd453d32856d",
        "rogue_agent_key_hold": "47b110baa8e3636574c1033dda1cce780873647fab58223d159d4fee6f180e86",
        "rogue_agent_key_updown": "9797cfef477c13306f7a33874ab4d6cf700f8f2c7e5825a2a5bc02004370909a",
    },
    "realTraffic": {
        "TravelTime_387": "38e70e9ead8227fd023bff6e93247d5bc01ee008f781b921a156962419b399bb",
        "TravelTime_451": "7c174adfc457b201cd111d60688f7ec37eb7201c8080790dc41eeff477bd7345",
        "occupancy_6005": "cd357d7820d675074270fd976d4af1fc1e7854ecb764783028cbcb18d980c91d",
        "occupancy_t4013": "5663a8122a300360eb51fbbd0f21706da05af1af55262926d6a226bb6d071704",
        "speed_6005": "7976e7596cd1e579696c737576e96a26fe041484472ed7d0a463ce2b094d7aa7",
        "speed_7578": "15ba994384730cb5a2e6818f17ded1430b40d92eb7a08e5b1a48a445c8c350f6",
        "speed_t4013": "fa5532d6f7db36cadc73e657fd4dfef05cb1ec44d4010243b314d3f1bbd6a7b5",
    },
    "realTweets": {
        "Twitter_volume_AAPL": "826f5cf404c2890784a7824f7102fd00cb134a4948e12e44ec320d095cbbc217",
        "Twitter_volume_AMZN": "234f5e63f19a62720dfb7ccfd6ecc8349b94d93b33ef8aafbdb17edda0b654f3",
        "Twitter_volume_CRM": "e7133bf26479623d58fc7367107aea1cd7df6020420dece48b0eee4d26cdb28a",
        "Twitter_volume_CVS": "f0bdc89cba3dd2265b47069187c750eeae18ef48f76f86067ee26ea1af9c3114",
        "Twitter_volume_FB": "a7096bd646759486bda6796b5600cd33a4590f0842bf274ea7acba001b3ba591",
        "Twitter_volume_GOOG": "3a39cc23d1ff6a0f234b55298d0c46c21d2e94ddb81a0dad9e1e46e3aaa9ec90",
        "Twitter_volume_IBM": "4309bd56d28ddcbdc168e207da9717395fa2e9f74dba41fa768e0f7da8a116fa",
        "Twitter_volume_KO": "f3aa8157043c6569911031535bd1f7a73b428b5a2d95238d79b9d5b88ceebbd2",
        "Twitter_volume_PFE": "18d2804d6a5dae63fe711baaba9242dce38a32bfade3dcdee1d8a7c1a866e41b",
        "Twitter_volume_UPS": "be50f06bbb9d020f37653c8c5cf19af63f77aa0019d8cf10849d91f4af455af4",
    },
}
"""Group, series, SHA-256 of its CSV file."""
